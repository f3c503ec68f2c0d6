"""What to say when nothing fits: how much is missing where, and the smallest changes that would fit."""

from __future__ import annotations

from collections.abc import Sequence

from vpipe.cost import Profile, for_batch_size
from vpipe.plan.least import fits, least_of_all
from vpipe.plan.task import Task
from vpipe.system.units import show_bytes


def nothing_fits(tasks: Sequence[Task], profile: Profile) -> str:
    """The message for tasks that differ in their schedule only and of which none has a plan."""
    found = least_of_all(tasks)
    if found is None:
        task = tasks[0]
        return (
            f"schedule {task.schedule!r} cannot be planned for {task.ranks} ranks and "
            f"{len(profile.blocks)} blocks: every chunk holds at least one block; use fewer ranks or chunks, "
            "or another schedule"
        )
    task, least = found
    blocks = " and ".join(f"{piece.start} to {piece.stop - 1}" for piece in least.slices)
    missing = least.memory - task.memory
    changes = [f"a memory of {least.memory} bytes ({show_bytes(least.memory)})"]
    # The one that needs least first: it is the likeliest to fit.
    quick = [other for other in sorted(tasks, key=lambda other: other is not task) if other.quick]
    if quick and (ranks := _ranks(quick)) is not None:
        changes.append(f"{ranks} ranks")
    if quick and (size := _batch_size(quick, profile)) is not None:
        changes.append(f"a batch size of {size}")
    return (
        f"nothing fits a memory of {task.memory} bytes ({show_bytes(task.memory)}) on {task.ranks} "
        f"{'rank' if task.ranks == 1 else 'ranks'} with schedule {task.schedule!r} and batch size "
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
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fit(middle) else (middle, high)
    return high


def _batch_size(tasks: Sequence[Task], profile: Profile) -> int | None:
    """The largest smaller one that fits, if any does; of large problems a half, a quarter, ... of the size."""

    def fit(size: int) -> bool:
        return any(fits(task._replace(profile=for_batch_size(profile, size))) for task in tasks)

    low, high = 1, tasks[0].profile.batch_size
    if not tasks[0].small:
        return next((high >> by for by in range(1, high.bit_length()) if fit(high >> by)), None)
    if high <= 1 or not fit(low):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fit(middle) else (low, middle)
    return low
