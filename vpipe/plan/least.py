"""The least memory under which a schedule has any plan, and whether there is one at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf
from typing import NamedTuple

from vpipe.plan.chunks import PositionHolding
from vpipe.plan.model import Slice
from vpipe.plan.reach import all_moves, least_limit
from vpipe.plan.slices import MemoryCosts
from vpipe.plan.stages import is_below, placed, search
from vpipe.plan.task import Task, divisors, loads_of, seats_of, weights_alone


class Least(NamedTuple):
    """The least memory in which a schedule runs, and the blocks of the rank that needs it."""

    memory: int
    position: int
    slices: tuple[Slice, ...]


def least_of_all(tasks: Sequence[Task]) -> tuple[Task, Least] | None:
    """The least of tasks that differ in their schedule only; None if the model has too few blocks for all of them.

    Those that seem to need least go first, and leave a limit to the others.
    """
    best: tuple[Task, Least] | None = None
    for bound, place, task, find in sorted(_ways(tasks), key=lambda way: way[:2]):
        limit = inf if best is None else best[1].memory
        found = find(limit) if bound <= limit else None
        if found is not None and (best is None or (found.memory, place) < (limit, tasks.index(best[0]))):
            best = task, found
    return best


def _ways(tasks: Sequence[Task]) -> Iterator[tuple[float, int, Task, Callable[[float], Least | None]]]:
    """By a bound for what it needs, and by the task's place: how the least of one layout is found under a limit."""
    for place, task in enumerate(tasks):
        if not task.in_line:
            # Of large problems only the most positions: there may be less elsewhere, but this fits.
            for positions in divisors(task) if task.small else divisors(task)[-1:]:
                bound = max(weights_alone(task, positions), task.memory)
                yield bound, place, task, partial(_chunked_least, task, positions)
            continue
        for loads in loads_of(task):
            costs = MemoryCosts(task.profile, loads)
            bound = least_limit(all_moves(loads), costs.floors, len(task.profile.blocks))
            yield bound, place, task, partial(_line_least, costs)


def _line_least(costs: MemoryCosts, limit: float) -> Least | None:
    stages = search(costs, len(costs.profile.blocks), even=False, limit=limit)
    if stages is None:
        return None
    worst = max(range(len(stages)), key=lambda index: stages[index].cost)
    return Least(int(stages[worst].cost), worst, (placed(stages, costs.loads)[worst],))


def fits(task: Task) -> bool:
    """Whether there is any plan."""
    if not task.in_line:
        return any(_missing(seats) == 0 for seats in _every_seats(task))
    costs = (MemoryCosts(task.profile, loads) for loads in loads_of(task))
    return any(is_below(cost, len(task.profile.blocks), task.memory) for cost in costs)


def _chunked_least(task: Task, positions: int, limit: float) -> Least | None:
    """A memory in which the climb finds its way; where that is quick, with a byte less it does not."""
    low = high = task.memory
    if not (seats := seats_of(task, positions)):
        return None
    last, times = seats, 1
    while (missing := _missing(seats)) > 0:
        low, high, last = high, high + times * missing, seats
        if high > limit and not task.small:
            return None
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


def _missing(seats: Sequence[PositionHolding]) -> int:
    return max(seat.missing for seat in seats)


def _every_seats(task: Task) -> Iterator[list[PositionHolding]]:
    for positions in divisors(task):
        if weights_alone(task, positions) <= task.memory and (seats := seats_of(task, positions)):
            yield seats
