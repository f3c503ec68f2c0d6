"""The planner: partition, memory policy, replicas, and if requested schedule and batch size, in one search."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from math import inf

from vpipe.cost import Profile, as_scheduled, for_batch_size
from vpipe.errors import ScheduleError, VPipeError
from vpipe.plan.advice import nothing_fits
from vpipe.plan.one_schedule import plan_schedule
from vpipe.plan.result import PlanResult
from vpipe.plan.task import Task
from vpipe.schedule import ASYNCHRONOUS, NAMES, SPLIT
from vpipe.system.units import show_bytes

AUTO = "auto"
# Where two are equally fast the earlier is taken: synchronous ones train without stale weights. `pipedream` is
# `vpipe` by another name.
TRIED = ("1f1b", "zb-h1", "zb-v", "interleaved", "gpipe", "2bw", "vpipe")
LARGEST = 64
"""How many times the profiled batch size is the largest that `auto` looks at."""


def plan(
    profile: Profile,
    ranks: int,
    memory: int | None = None,
    schedule: str = "vpipe",
    minibatches: int | None = None,
    batch_size: int | str | None = None,
    chunks: int | None = None,
) -> PlanResult:
    """The fastest way to train on so many ranks within `memory` bytes each (default: the profiled device's).

    `schedule` is a name, or 'auto' for the fastest of all that fit; `minibatches` are those of an update of the
    synchronous ones (default: four for each rank); `batch_size` is the size of a minibatch (default: the
    profile's), or 'auto' for the one with the most samples a second. Raises VPipeError where nothing fits.
    """
    memory = profile.device.memory if memory is None else memory
    for what, value in (
        ("ranks", ranks),
        ("memory", memory),
        ("minibatches", minibatches),
        ("chunks", chunks),
    ):
        if value is not None:
            at_least_one(what, value)
    if not profile.blocks:
        raise VPipeError("the profile has no blocks: there is nothing to plan")
    names = schedule_names(schedule)

    def task(name: str, size: int) -> Task:
        made = Task(for_batch_size(profile, size), ranks, memory, name, minibatches, chunks)
        return made._replace(profile=as_scheduled(made.profile, name in SPLIT, made.update_interval))

    if isinstance(batch_size, str):
        if batch_size != AUTO:
            raise VPipeError(f"batch size {batch_size!r} is neither a number nor {AUTO!r}")
        found = fastest_size(task, names, profile.batch_size)
        size = 1
    else:
        size = profile.batch_size if batch_size is None else batch_size
        at_least_one("batch_size", size)
        found = fastest_schedule([task(name, size) for name in names])
    if found is None and profile.device.graphs:
        raise VPipeError(
            f"no plan was found with stages on CUDA graphs in a memory of {memory} bytes ({show_bytes(memory)}): give "
            "more of it, more ranks or smaller minibatches, or leave cuda_graphs out, which take some of it"
        )
    if found is None:
        raise VPipeError(nothing_fits([task(name, size) for name in names], profile))
    return found


def fastest_size(task: Callable[[str, int], Task], names: Iterable[str], usual: int) -> PlanResult | None:
    """The best of all powers of two that fit, and of the sizes between its neighbours."""

    def at(size: int, limit: float = inf) -> PlanResult | None:
        """`limit`: seconds a sample."""
        return fastest_schedule([task(name, size) for name in names], limit * size)

    found: list[PlanResult | None] = []
    size = 1
    while size <= LARGEST * usual and (reached := at(size)) is not None:
        found.append(reached)
        size *= 2
    best = fastest(found)
    if best is None:
        return None
    eighths = {best.batch_size * part // 8 for part in (5, 6, 7, 9, 10, 11, 12, 13, 14, 15)}
    for size in sorted(eighths - {0, best.batch_size}):
        best = fastest([best, at(size, best.seconds / best.batch_size)])
        assert best is not None
    return best


def fastest_schedule(tasks: Sequence[Task], limit: float = inf) -> PlanResult | None:
    """The best plan of tasks that differ in their schedule only, if it takes at most `limit` seconds a minibatch.

    Asynchronous schedules go first: without bubbles they leave a limit that most others need not be searched under.
    """
    found: dict[str, PlanResult | None] = {}
    for task in sorted(tasks, key=lambda task: task.schedule not in ASYNCHRONOUS):
        result = found[task.schedule] = plan_schedule(task, limit)
        limit = limit if result is None else min(limit, result.seconds)
    return fastest(found[task.schedule] for task in tasks)


def fastest(results: Iterable[PlanResult | None]) -> PlanResult | None:
    """The first of those with the most samples a second."""
    best: PlanResult | None = None
    for result in results:
        if result is not None and (best is None or result.samples_per_second > best.samples_per_second):
            best = result
    return best


def schedule_names(schedule: str) -> tuple[str, ...]:
    if schedule == AUTO:
        return TRIED
    if schedule not in NAMES:
        close = get_close_matches(schedule, NAMES, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ScheduleError(
            f"unknown schedule {schedule!r}: {hint}choose {AUTO} or one of {', '.join(NAMES)}"
        )
    return (schedule,)


def at_least_one(what: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise VPipeError(f"{what} is {value!r}: it must be a whole number, 1 or more")
