"""The refusal where nothing fits: how much is missing where, and the smallest changes that would fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf
from typing import NamedTuple

from vpipe.cost import Profile, for_batch_size
from vpipe.plan.chunks import PositionHolding
from vpipe.plan.model import Slice
from vpipe.plan.slices import MemoryCosts
from vpipe.plan.stage_bounds import all_moves, least_limit
from vpipe.plan.stages import placed, search
from vpipe.plan.task import Task, divisors, holdings_of, least_loads_of, weights_alone
from vpipe.system.units import show_bytes


def nothing_fits(tasks: Sequence[Task], profile: Profile) -> str:
    """The message for tasks that differ in their schedule only and of which none has a plan."""
    found = least_of_all(tasks)
    if found is None:
        task = tasks[0]
        return (
            f"schedule {task.kind.name!r} cannot be planned for {task.ranks} ranks and "
            f"{len(profile.blocks)} blocks: every chunk holds at least one block; use fewer ranks or chunks, "
            "or another schedule"
        )
    task, least = found
    blocks = " and ".join(f"{piece.start} to {piece.stop - 1}" for piece in least.slices)
    missing = least.memory - task.memory
    changes = [f"a memory of {least.memory} bytes ({show_bytes(least.memory)})"]
    # The one that needs least first: it is the likeliest to fit.
    quick = [other for other in sorted(tasks, key=lambda other: other is not task) if other.quick]
    if quick and task.stages is None and (ranks := _ranks(quick)) is not None:
        changes.append(f"{ranks} ranks")
    if quick and (size := _batch_size(quick, profile)) is not None:
        changes.append(f"a batch size of {size}")
    return (
        f"nothing fits a memory of {task.memory} bytes ({show_bytes(task.memory)}) on {task.ranks} "
        f"{'rank' if task.ranks == 1 else 'ranks'} with schedule {task.kind.name!r} and batch size "
        f"{task.profile.batch_size}: at best {missing} bytes ({show_bytes(missing)}) are missing on stage "
        f"{least.position} (blocks {blocks}), even with everything recomputed or swapped that helps; "
        f"what would fit: {', or '.join(changes)}"
    )


def _ranks(tasks: Sequence[Task]) -> int | None:
    """The fewest more that fit, up to four times as many: steps twice as long until it does, then between the last two.

    More ranks need not need less of each (more minibatches are in flight); but with one fewer it does not fit. Of large
    problems only some numbers are tried.
    """

    def fit(ranks: int) -> bool:
        return any(fits(task._replace(ranks=ranks)) for task in tasks)

    ranks = tasks[0].ranks
    if not tasks[0].small:
        return next((more for more in (5 * ranks // 4, 3 * ranks // 2, 2 * ranks) if fit(more)), None)
    low, high, step = ranks, ranks + 1, 1
    while not fit(high):
        if high == 4 * ranks:
            return None
        step *= 2
        low, high = high, min(high + step, 4 * ranks)
    return _bisect(low, high, fit)


def _batch_size(tasks: Sequence[Task], profile: Profile) -> int | None:
    """The largest smaller one that fits, if any does; of large problems a half, a quarter, ... of the size."""

    def fit(size: int) -> bool:
        return any(fits(task._replace(profile=for_batch_size(profile, size))) for task in tasks)

    size = tasks[0].profile.batch_size
    if not tasks[0].small:
        return next((size >> by for by in range(1, size.bit_length()) if fit(size >> by)), None)
    return _bisect(size, 1, fit) if size > 1 and fit(1) else None


def _bisect(bad: int, good: int, fit: Callable[[int], bool]) -> int:
    """A number between one that does not fit and one that does: it fits, and the next one towards `bad` does not."""
    while abs(good - bad) > 1:
        middle = (good + bad) // 2
        bad, good = (bad, middle) if fit(middle) else (middle, good)
    return good


class Least(NamedTuple):
    """The least memory in which a schedule runs, and the blocks of the rank that needs it."""

    memory: int
    position: int
    slices: tuple[Slice, ...]


def least_of_all(tasks: Sequence[Task]) -> tuple[Task, Least] | None:
    """The least of tasks that differ in their schedule only; None if the model has too few blocks for all of them.

    Exact searches go first, those that seem to need least before the others, and leave a limit to the climbs.
    """
    best: tuple[Task, Least] | None = None
    for _, bound, place, find in sorted(_ways(tasks), key=lambda way: way[:3]):
        limit = inf if best is None else best[1].memory
        found = find(limit) if bound <= limit else None
        if found is not None and (best is None or (found.memory, place) < (limit, tasks.index(best[0]))):
            best = tasks[place], found
    return best


def _ways(tasks: Sequence[Task]) -> Iterator[tuple[bool, float, int, Callable[[float], Least | None]]]:
    """Whether it is a climb, a bound, the task's place; how the least of a layout is found under a limit."""
    placed = [(place, own) for place, task in enumerate(tasks) for own in task.with_idle_ranks()]
    for place, task in placed:
        if not task.in_line:
            # Of large problems only the most positions: there may be less elsewhere, but this fits.
            for positions in divisors(task) if task.small else divisors(task)[-1:]:
                bound = max(weights_alone(task, positions), task.memory)
                yield True, bound, place, partial(_chunked_least, task, positions)
            continue
        for loads in least_loads_of(task):
            costs = MemoryCosts(task.profile, loads)
            bound = least_limit(all_moves(loads), costs.floors, len(task.profile.blocks))
            yield False, bound, place, partial(_line_least, costs)


def _line_least(costs: MemoryCosts, limit: float) -> Least | None:
    stages = search(costs, len(costs.profile.blocks), even=False, limit=limit)
    if stages is None:
        return None
    worst = max(range(len(stages)), key=lambda index: stages[index].cost)
    return Least(int(stages[worst].cost), worst, (placed(stages, costs.loads)[worst],))


def fits(task: Task) -> bool:
    """Whether there is any plan."""
    return any(map(_fits_all_ranks, task.with_idle_ranks()))


def _fits_all_ranks(task: Task) -> bool:
    if not task.in_line:
        return any(_missing(holdings) == 0 for holdings in _every_layout(task))
    costs = (MemoryCosts(task.profile, loads) for loads in least_loads_of(task))
    blocks = len(task.profile.blocks)
    return any(search(cost, blocks, even=False, limit=task.memory) is not None for cost in costs)


def _chunked_least(task: Task, positions: int, limit: float) -> Least | None:
    """A memory in which the climb finds its way; where that is quick, with a byte less it does not."""
    low = high = task.memory
    if not (holdings := holdings_of(task, positions)):
        return None
    if limit < inf and _missing(holdings_of(task._replace(memory=int(limit)), positions)):
        return None
    last, times = holdings, 1
    while (missing := _missing(holdings)) > 0:
        low, high, last = high, int(min(high + times * missing, limit)), holdings
        times *= 2
        holdings = holdings_of(task._replace(memory=high), positions)
    while task.small and high - low > 1:
        middle = (low + high) // 2
        holdings = holdings_of(task._replace(memory=middle), positions)
        if _missing(holdings) == 0:
            high = middle
        else:
            low, last = middle, holdings
    worst = max(range(len(last)), key=lambda index: last[index].missing)
    return Least(high, worst, last[worst].slices)


def _missing(holdings: Sequence[PositionHolding]) -> int:
    return max(holding.missing for holding in holdings)


def _every_layout(task: Task) -> Iterator[list[PositionHolding]]:
    for positions in divisors(task):
        if weights_alone(task, positions) <= task.memory and (holdings := holdings_of(task, positions)):
            yield holdings
