"""What to say when nothing fits: how much is missing where, and the smallest changes that would fit."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from vpipe.cost import Profile, for_batch_size
from vpipe.plan.one_schedule import Least, Task, least_of_schedule
from vpipe.sizes import show_bytes


def nothing_fits(tasks: Sequence[Task], profile: Profile) -> str:
    """The message for tasks that differ in their schedule only and of which none has a plan."""
    task, least = _least(tasks)
    if least is None:
        return (
            f"schedule {task.schedule!r} cannot be planned for {task.ranks} ranks and "
            f"{len(profile.blocks)} blocks: every chunk holds at least one block; use fewer ranks or chunks, "
            "or another schedule"
        )
    blocks = " and ".join(f"{piece.start} to {piece.stop - 1}" for piece in least.slices)
    missing = least.memory - task.memory
    changes = [f"a memory of {least.memory} bytes ({show_bytes(least.memory)})"]
    if (ranks := _ranks(tasks)) is not None:
        changes.append(f"{ranks} ranks")
    if (size := _batch_size(tasks, profile)) is not None:
        changes.append(f"a batch size of {size}")
    return (
        f"nothing fits a memory of {task.memory} bytes ({show_bytes(task.memory)}) on {task.ranks} "
        f"{'rank' if task.ranks == 1 else 'ranks'} with schedule {task.schedule!r} and batch size "
        f"{task.profile.batch_size}: at best {missing} bytes ({show_bytes(missing)}) are missing on stage "
        f"{least.position} (blocks {blocks}), even with everything recomputed or swapped that helps; "
        f"what would fit: {', or '.join(changes)}"
    )


def _least(tasks: Sequence[Task]) -> tuple[Task, Least | None]:
    found = [(task, least_of_schedule(task)) for task in tasks]
    fitting = [(task, least) for task, least in found if least is not None]
    return min(fitting, key=lambda pair: pair[1].memory) if fitting else found[0]


def _fits(tasks: Sequence[Task]) -> bool:
    least = _least(tasks)[1]
    return least is not None and least.memory <= tasks[0].memory


def _ranks(tasks: Sequence[Task]) -> int | None:
    """One more, or else the first of some larger numbers."""
    ranks = tasks[0].ranks
    for more in (ranks + 1, ranks + 2, ceil(1.5 * ranks), 2 * ranks, 4 * ranks):
        if _fits([task._replace(ranks=more) for task in tasks]):
            return more
    return None


def _batch_size(tasks: Sequence[Task], profile: Profile) -> int | None:
    """The largest smaller one that fits, if any does: less is needed with every sample less."""

    def fits(size: int) -> bool:
        return _fits([task._replace(profile=for_batch_size(profile, size)) for task in tasks])

    low, high = 1, tasks[0].profile.batch_size
    if high <= 1 or not fits(low):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
