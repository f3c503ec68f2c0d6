"""The best plan under one schedule, and the least memory under which there is any."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from vpipe.cost import Profile
from vpipe.plan.chunks import Seat, search_chunks
from vpipe.plan.loads import (
    CHUNKED,
    EVEN,
    Loads,
    even_loads,
    schedule_loads,
    staircase_loads,
    two_versions_interval,
)
from vpipe.plan.model import Slice, stage_time
from vpipe.plan.moments import schedule_moments
from vpipe.plan.policies import from_the_end
from vpipe.plan.result import PlanResult, Position, assemble
from vpipe.plan.sharing import with_parts_of_the_link
from vpipe.plan.slices import MemoryCosts, TimeCosts
from vpipe.plan.stages import Stage, is_below, search
from vpipe.schedule import ASYNCHRONOUS, build

SMALL = 1000
"""Ranks times blocks."""


class Task(NamedTuple):
    """What is to be planned; the profile is that of the batch size in question."""

    profile: Profile
    ranks: int
    memory: int
    schedule: str
    minibatches: int | None
    chunks: int | None

    @property
    def update(self) -> int:
        """Minibatches of a synchronous update."""
        return self.minibatches or 4 * self.ranks

    @property
    def update_interval(self) -> int:
        """Minibatches of an update of this schedule."""
        if self.schedule not in ASYNCHRONOUS:
            return self.update
        return two_versions_interval(self.ranks) if self.schedule == "2bw" else 1

    @property
    def small(self) -> bool:
        """Whether there is time to look for the very smallest change that would fit."""
        return self.ranks * len(self.profile.blocks) <= SMALL

    @property
    def quick(self) -> bool:
        """Whether there is time to try other ranks and batch sizes."""
        return self.small or self.schedule not in CHUNKED


class Least(NamedTuple):
    """The least memory in which a schedule runs, and the blocks of the rank that needs it."""

    memory: int
    position: int
    slices: tuple[Slice, ...]


def plan_schedule(task: Task) -> PlanResult | None:
    """The fastest plan that fits; None if there is none."""
    found = list(_plans(task, task.profile))
    if any(waits_for_others(task.profile, result) for result in found):
        for profile in with_parts_of_the_link(task.profile):
            found += _plans(task, profile)
    return min(found, key=lambda result: result.seconds, default=None)


def least_of_schedule(task: Task) -> Least | None:
    """None if the model has too few blocks for the schedule."""
    return min(_leasts(task), key=lambda found: found.memory, default=None)


def waits_for_others(profile: Profile, result: PlanResult) -> bool:
    """Whether ranks that share a link to the host slow each other down."""
    alone = 0.0
    for position in result.positions:
        slices, policies = zip(*((stage.slice, stage.policies) for stage in position.stages), strict=True)
        alone = max(alone, stage_time(profile, slices, policies).seconds / len(position.ranks))
    return max(position.seconds for position in result.positions) > alone


def _plans(task: Task, searched: Profile) -> Iterator[PlanResult]:
    """The best for each number of positions that the schedule may have, by the costs that are `searched` with."""
    if task.schedule in CHUNKED:
        for seats in _every_seats(task._replace(profile=searched)):
            chosen = [
                Position(seat.slices, seat.policies, seat.memory)
                for seat in seats
                if seat.policies is not None
            ]
            if len(chosen) == len(seats):
                chunks = len(seats[0].slices)
                yield assemble(task.profile, task.schedule, task.memory, task.update, chunks, None, chosen)
        return
    asynchronous = task.schedule in ASYNCHRONOUS
    interval = task.update_interval if task.schedule == "2bw" else None
    for loads in _loads(task):
        costs = TimeCosts(searched, loads, task.memory)
        stages = search(costs, len(task.profile.blocks))
        if stages is not None:
            slices = placed(stages, loads)
            policies = [
                from_the_end(
                    searched, piece, costs.policies[stage.start, stage.stop, stage.load], task.memory
                )
                for piece, stage in zip(slices, stages, strict=True)
            ]
            yield assemble(
                task.profile,
                task.schedule,
                task.memory,
                task.minibatches if asynchronous else task.update,
                None,
                interval,
                [Position([piece], [chosen]) for piece, chosen in zip(slices, policies, strict=True)],
            )


def fits(task: Task) -> bool:
    """Whether there is any plan."""
    if task.schedule in CHUNKED:
        return any(_missing(seats) == 0 for seats in _every_seats(task))
    costs = (MemoryCosts(task.profile, loads) for loads in _loads(task))
    return any(is_below(cost, len(task.profile.blocks), task.memory) for cost in costs)


def _leasts(task: Task) -> Iterator[Least]:
    if task.schedule in CHUNKED:
        # Of large problems only the most positions: there may be less elsewhere, but this fits.
        for positions in reversed(_divisors(task)):
            if seats := _seats(task, positions):
                yield _chunked_least(task, positions, seats)
                if not task.small:
                    return
        return
    for loads in _loads(task):
        stages = search(MemoryCosts(task.profile, loads), len(task.profile.blocks), even=False)
        if stages is not None:
            worst = max(range(len(stages)), key=lambda index: stages[index].cost)
            yield Least(int(stages[worst].cost), worst, (placed(stages, loads)[worst],))


def _chunked_least(task: Task, positions: int, seats: list[Seat]) -> Least:
    """A memory in which the climb finds its way; where that is quick, with a byte less it does not."""
    low = high = task.memory
    last, times = seats, 1
    while (missing := _missing(seats)) > 0:
        low, high, last = high, high + times * missing, seats
        times *= 2
        seats = _seats(task._replace(memory=high), positions)
    while task.small and high - low > 1:
        middle = (low + high) // 2
        seats = _seats(task._replace(memory=middle), positions)
        if _missing(seats) == 0:
            high = middle
        else:
            low, last = middle, seats
    worst = max(range(len(last)), key=lambda index: last[index].missing)
    return Least(high, worst, last[worst].slices)


def _missing(seats: Sequence[Seat]) -> int:
    return max(seat.missing for seat in seats)


def _every_seats(task: Task) -> Iterator[list[Seat]]:
    for positions in _divisors(task):
        if _weights_alone(task, positions) <= task.memory and (seats := _seats(task, positions)):
            yield seats


def _loads(task: Task) -> Iterable[Loads]:
    if task.schedule not in EVEN:
        return [staircase_loads(task.schedule, task.ranks, task.update)]
    return [
        even_loads(task.schedule, positions, task.ranks // positions, task.update)
        for positions in _divisors(task)
    ]


def _seats(task: Task, positions: int) -> list[Seat]:
    replicas = task.ranks // positions
    chunks = task.chunks if task.schedule == "interleaved" else None
    schedule = build(task.schedule, positions, task.update, chunks=chunks, replicas=[replicas] * positions)
    loads = schedule_loads(task.schedule, positions, replicas, task.update, chunks)
    moments = schedule_moments(task.schedule, positions, replicas, task.update, chunks)
    return search_chunks(task.profile, schedule.placement, loads, moments, task.memory) or []


def _weights_alone(task: Task, positions: int) -> float:
    """What a rank holds at least, however the blocks are cut: its share of weights, gradients, optimizer state."""
    return (
        task.profile.parameter_bytes(0, len(task.profile.blocks))
        * (2 + task.profile.optimizer_ratio)
        / positions
    )


def _divisors(task: Task) -> list[int]:
    """The numbers of positions that leave equally many replicas to each, at most one for each minibatch."""
    return [
        positions
        for positions in range(1, min(task.ranks, len(task.profile.blocks)) + 1)
        if task.ranks % positions == 0 and task.ranks // positions <= task.update
    ]


def placed(stages: list[Stage], loads: Loads) -> list[Slice]:
    """The stages as slices, ranks numbered stage by stage."""
    slices: list[Slice] = []
    first = 0
    for stage in stages:
        load = loads.loads[stage.load]
        following = first + load.replicas
        ranks = tuple(range(first, following))
        before = first - 1 if first else None
        after = following if following < loads.ranks else None
        slices.append(Slice(stage.start, stage.stop, load, ranks, before, after))
        first = following
    return slices
