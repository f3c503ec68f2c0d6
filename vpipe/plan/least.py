"""The least memory under which a schedule has any plan, and whether there is one at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from vpipe.plan.chunks import Seat
from vpipe.plan.loads import CHUNKED
from vpipe.plan.model import Slice
from vpipe.plan.slices import MemoryCosts
from vpipe.plan.stages import is_below, placed, search
from vpipe.plan.task import Task, divisors, loads_of, seats_of, weights_alone


class Least(NamedTuple):
    """The least memory in which a schedule runs, and the blocks of the rank that needs it."""

    memory: int
    position: int
    slices: tuple[Slice, ...]


def least_of_schedule(task: Task) -> Least | None:
    """None if the model has too few blocks for the schedule."""
    return min(_leasts(task), key=lambda found: found.memory, default=None)


def fits(task: Task) -> bool:
    """Whether there is any plan."""
    if task.schedule in CHUNKED:
        return any(_missing(seats) == 0 for seats in _every_seats(task))
    costs = (MemoryCosts(task.profile, loads) for loads in loads_of(task))
    return any(is_below(cost, len(task.profile.blocks), task.memory) for cost in costs)


def _leasts(task: Task) -> Iterator[Least]:
    if task.schedule in CHUNKED:
        # Of large problems only the most positions: there may be less elsewhere, but this fits.
        for positions in reversed(divisors(task)):
            if seats := seats_of(task, positions):
                yield _chunked_least(task, positions, seats)
                if not task.small:
                    return
        return
    for loads in loads_of(task):
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
        seats = seats_of(task._replace(memory=high), positions)
    while task.small and high - low > 1:
        middle = (low + high) // 2
        seats = seats_of(task._replace(memory=middle), positions)
        if _missing(seats) == 0:
            high = middle
        else:
            low, last = middle, seats
    worst = max(range(len(last)), key=lambda index: last[index].missing)
    return Least(high, worst, last[worst].slices)


def _missing(seats: Sequence[Seat]) -> int:
    return max(seat.missing for seat in seats)


def _every_seats(task: Task) -> Iterator[list[Seat]]:
    for positions in divisors(task):
        if weights_alone(task, positions) <= task.memory and (seats := seats_of(task, positions)):
            yield seats
