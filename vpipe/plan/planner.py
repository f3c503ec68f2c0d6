"""The planner: partition, memory policy, replicas, and if requested schedule and batch size, in one search."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import inf

from vpipe.cost import Profile, StaleTraining, for_batch_size
from vpipe.errors import ScheduleError, VPipeError
from vpipe.plan.advice import nothing_fits
from vpipe.plan.one_schedule import plan_schedule
from vpipe.plan.result import PlanResult, stale_factor
from vpipe.plan.task import Task
from vpipe.schedule import KINDS, Schedule, ScheduleKind, kind_of, table_kind
from vpipe.schedule.facts import MOST_FORWARDS
from vpipe.schedule.kind import MOST_RANKS, MOST_STAGES, at_least_one, at_most
from vpipe.simulate.traffic import host_traffic
from vpipe.system.units import read_bytes, show_bytes

AUTO = "auto"
USUAL = StaleTraining()
LARGEST = 64
"""How many times the profiled batch size is the largest that `auto` looks at."""


def plan(
    profile: Profile,
    ranks: int,
    memory: int | str | None = None,
    schedule: str | Schedule = "vpipe",
    minibatches: int | None = None,
    batch_size: int | str | None = None,
    chunks: int | None = None,
    training: StaleTraining | None = USUAL,
    stages: int | None = None,
    all_ranks: bool = False,
) -> PlanResult:
    """Find the fastest way to train on so many ranks within a memory: partition, policies, replicas, schedule.

        profile = vpipe.profile(model, batch, optimizer=optimizer)
        found = vpipe.plan(profile, ranks=4, memory="11GiB", schedule="auto")

    Args:
        profile: The costs of the model's blocks, from `vpipe.profile`.
        ranks: The number of ranks.
        memory: Memory of each rank in bytes, or as text such as "11GiB"; by default that of the profiled device.
        schedule: A name, a `Schedule`, or "auto" for the one of all names that fit that reaches a loss first.
        minibatches: Minibatches of an update of a synchronous schedule; by default four for each rank.
        batch_size: Samples of a minibatch, by default the profile's; "auto" for the size with the most samples a
            second.
        chunks: Stages on each rank, for "interleaved".
        training: For "auto": the optimizer, and whether stale weights are predicted. The samples that this needs in
            addition to equal loss count against an asynchronous schedule. None: samples a second alone count.
        stages: Positions of the pipeline; fewer than ranks have replicas. By default as many as are fastest.
        all_ranks: Leave no rank idle, even if that is slower.

    Returns:
        The plan, with what it needs and should cost; its `to_plan()` is what Pipeline and files take.

    Raises:
        VPipeError: Nothing fits; the message says what would.
    """
    if isinstance(memory, str):
        memory = read_bytes(memory)
    memory = profile.device.usable if memory is None else memory
    numbers = {
        "ranks": ranks, "memory": memory, "minibatches": minibatches, "chunks": chunks, "stages": stages,
    }  # fmt: skip
    for what, value in numbers.items():
        if value is not None:
            at_least_one(what, value)
    at_most("ranks", ranks, MOST_RANKS)
    at_most("stages, with chunks of each,", ranks * (chunks or 1), MOST_STAGES)
    at_most("minibatches", minibatches or 1, MOST_FORWARDS // ranks)
    if profile.hosts is not None:
        profile.hosts.check(ranks)
    if not profile.blocks:
        raise VPipeError("the profile has no blocks: there is nothing to plan")
    kinds = kinds_of(schedule)
    if isinstance(schedule, Schedule):
        check_table(schedule, ranks, minibatches, chunks)
    if schedule != AUTO:
        training = None  # there is nothing to choose
    if stages is not None:
        kinds = kinds_with_stages(kinds, stages, ranks, len(profile.blocks))

    def task(kind: ScheduleKind, size: int) -> Task:
        given = for_batch_size(profile, size)
        # Of an asynchronous schedule they would be those of the whole run, which would be one that only fills up.
        count = minibatches if kind.synchronous or schedule != AUTO else None
        by_loss = training is not None
        return Task(
            given, ranks, memory, kind, count, chunks, given, stages, None, by_loss, all_ranks, len(kinds)
        ).scheduled()

    if isinstance(batch_size, str):
        if batch_size != AUTO:
            raise VPipeError(f"batch size {batch_size!r} is neither a number nor {AUTO!r}")
        found = fastest_size(task, kinds, profile.batch_size, training)
        size = 1
    else:
        size = profile.batch_size if batch_size is None else batch_size
        at_least_one("batch_size", size)
        found = fastest_schedule([task(kind, size) for kind in kinds], training)
    if found is None and profile.device.graphs:
        raise VPipeError(
            f"no plan was found with stages on CUDA graphs in a memory of {memory} bytes ({show_bytes(memory)}): give "
            "more of it, more ranks or smaller minibatches, or leave cuda_graphs out, which take some of it"
        )
    if found is None:
        raise VPipeError(nothing_fits([task(kind, size) for kind in kinds], profile))
    return replace(found, hosts=host_traffic(profile, found.to_plan(), found.kind.table))


def fastest_size(
    task: Callable[[ScheduleKind, int], Task],
    kinds: Iterable[ScheduleKind],
    usual: int,
    training: StaleTraining | None = None,
) -> PlanResult | None:
    """The best of all powers of two that fit, and of the sizes between its neighbours."""

    def at(size: int, limit: float = inf) -> PlanResult | None:
        """`limit`: seconds a sample."""
        return fastest_schedule([task(kind, size) for kind in kinds], training, limit * size)

    found: list[PlanResult | None] = []
    size = 1
    while size <= LARGEST * usual and (reached := at(size)) is not None:
        found.append(reached)
        size *= 2
    best = soonest(found)
    if best is None:
        return None
    eighths = {best.batch_size * part // 8 for part in (5, 6, 7, 9, 10, 11, 12, 13, 14, 15)}
    for size in sorted(eighths - {0, best.batch_size}):
        best = soonest([best, at(size, best.seconds_to_loss / best.batch_size)])
        assert best is not None
    return best


def fastest_schedule(
    tasks: Sequence[Task], training: StaleTraining | None = None, limit: float = inf
) -> PlanResult | None:
    """The best plan of tasks that differ in their schedule only, if it takes at most `limit` seconds a minibatch.

    Asynchronous schedules go first, and of the others those that split backward and have several stages on a rank:
    with small bubbles they leave a limit that most others need not be searched under. Of large problems the
    asynchronous ones go last: stale weights let them win less often, and under a limit their search is much shorter.
    """
    found: dict[str, PlanResult | None] = {}

    def bubbles(task: Task) -> tuple[bool, bool, int]:
        return task.kind.synchronous == task.small, not task.kind.splits_backward, -task.kind.chunks

    for task in sorted(tasks, key=bubbles):
        result = plan_schedule(task, limit)
        if result is not None:
            if training is not None:
                result = replace(result, sample_factor=stale_factor(result, training))
            limit = min(limit, result.seconds_to_loss)
        found[task.kind.name] = result
    results = [found[task.kind.name] for task in tasks]
    best = soonest(results)
    fastest = max(filter(None, results), key=lambda result: result.samples_per_second, default=None)
    if best is None or fastest is None or fastest.seconds >= best.seconds:
        return best
    return replace(best, faster=fastest)


def soonest(results: Iterable[PlanResult | None]) -> PlanResult | None:
    """The first of those that take the least time for a sample, at equal loss."""
    found = (result for result in results if result is not None)
    return min(found, key=lambda result: result.seconds_to_loss / result.batch_size, default=None)


def kinds_of(schedule: str | Schedule) -> list[ScheduleKind]:
    """Those to be tried; of two that differ in their name only, the first."""
    if isinstance(schedule, Schedule):
        return [table_kind(schedule)]
    if schedule != AUTO:
        return [kind_of(schedule)]
    different: dict[ScheduleKind, ScheduleKind] = {}
    for kind in KINDS.values():
        different.setdefault(replace(kind, name=""), kind)
    return list(different.values())


def kinds_with_stages(
    kinds: Sequence[ScheduleKind], stages: int, ranks: int, blocks: int
) -> list[ScheduleKind]:
    """Those that can have so many positions; an error if there are none."""
    if stages > min(ranks, blocks):
        raise VPipeError(
            f"stages is {stages}, but there are {ranks} ranks and the model has {blocks} blocks: give at most "
            f"{min(ranks, blocks)}{', or more ranks' if ranks < blocks else ''}"
        )

    def fits(kind: ScheduleKind) -> bool:
        if kind.table is not None:
            return stages == len(set(kind.table.placement))
        return stages == ranks or (kind.replicas == "equal" and ranks % stages == 0) or kind.replicas == "any"

    found = [kind for kind in kinds if fits(kind)]
    if not found:
        raise VPipeError(
            f"stages is {stages}, which schedule {kinds[0].name!r} cannot have on {ranks} ranks: give as many ranks, "
            "or another schedule"
        )
    return found


def check_table(table: Schedule, ranks: int, minibatches: int | None, chunks: int | None) -> None:
    """Whether a table can be planned for so many ranks."""
    stages = max(len(table.stages_of(rank)) for rank in range(table.num_ranks))
    for what, value, own in (
        ("ranks", ranks, table.num_ranks),
        ("minibatches", minibatches, table.minibatches),
        ("chunks", chunks, stages),
    ):
        if value not in (None, own):
            raise ScheduleError(
                f"{what} is {value}, but the table {table.name!r} is written for {own}: make the two equal"
            )
    places = sorted(set(table.placement))
    for one, other in itertools.combinations(places, 2):
        if not set(one).isdisjoint(other):
            raise ScheduleError(
                f"schedule {table.name!r} has a stage on ranks {', '.join(map(str, one))} and another on ranks "
                f"{', '.join(map(str, other))}, which share some ranks but not all: it cannot be planned; "
                "give the partition yourself"
            )
