"""What is to be planned, and the layouts that its schedule may have: loads by place, or seats by position."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from vpipe.cost import Profile
from vpipe.plan.chunks import PositionHolding, search_chunks
from vpipe.plan.loads import (
    AT_ONCE,
    CHUNKED,
    EVEN,
    Loads,
    equal_loads,
    even_loads,
    schedule_loads,
    staircase_loads,
    two_versions_interval,
)
from vpipe.plan.moments import schedule_moments
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


def divisors(task: Task) -> list[int]:
    """The numbers of positions that leave equally many replicas to each, at most one for each minibatch."""
    return [
        positions
        for positions in range(1, min(task.ranks, len(task.profile.blocks)) + 1)
        if task.ranks % positions == 0 and task.ranks // positions <= task.update
    ]


def loads_of(task: Task) -> Iterable[Loads]:
    if task.schedule not in EVEN:
        # Among equal replicas they need less memory.
        equal = divisors(task)[::-1] if task.schedule in AT_ONCE else []
        return [
            *(equal_loads(task.schedule, task.ranks, task.ranks // one, task.update) for one in equal),
            staircase_loads(task.schedule, task.ranks, task.update),
        ]
    return [
        even_loads(task.schedule, positions, task.ranks // positions, task.update)
        for positions in divisors(task)
    ]


def equal_loads_of(task: Task) -> Iterable[Loads]:
    """Of schedules whose stages may differ in their replicas: a stage for each rank, and one stage on all ranks.

    By sums uneven replicas make stages of equal length. But they wait for each other, which only a simulation tells,
    and then one of these may be quicker. Asynchronous replicas wait in any case.
    """
    if task.schedule in EVEN or task.schedule in AT_ONCE:
        return []
    ends = {task.ranks} if task.schedule in ASYNCHRONOUS else {task.ranks, 1}
    return [
        equal_loads(task.schedule, task.ranks, task.ranks // positions, task.update)
        for positions in divisors(task)
        if positions in ends
    ]


def seats_of(task: Task, positions: int) -> list[PositionHolding]:
    replicas = task.ranks // positions
    chunks = task.chunks if task.schedule == "interleaved" else None
    schedule = build(task.schedule, positions, task.update, chunks=chunks, replicas=[replicas] * positions)
    loads = schedule_loads(task.schedule, positions, replicas, task.update, chunks)
    moments = schedule_moments(task.schedule, positions, replicas, task.update, chunks)
    return search_chunks(task.profile, schedule.placement, loads, moments, task.memory) or []


def weights_alone(task: Task, positions: int) -> float:
    """What a rank holds at least, however the blocks are cut: its share of weights, gradients, optimizer state."""
    return (
        task.profile.parameter_bytes(0, len(task.profile.blocks))
        * (2 + task.profile.optimizer_ratio)
        / positions
    )
