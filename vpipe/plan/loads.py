"""The loads of a schedule: minibatches in flight and weight versions of every stage, as its programs or its rule say.

Where a schedule's `holding` rule gives them by a stage's place alone (the ranks from it to the pipeline's end, and its
own replicas), stages may have any replicas. Of all other schedules they are read from the programs: with equally many
replicas everywhere, or as a table has them. Whether gradients are fresh depends on the other stages: among any replicas
they are taken not to be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from vpipe.plan.model import Load
from vpipe.schedule import Op, Schedule, ScheduleKind, holdings
from vpipe.schedule.facts import fresh_gradients, sample
from vpipe.schedule.kind import too_shallow
from vpipe.schedule.program import in_order


@dataclass(frozen=True)
class Loads:
    """The loads that a search may choose from, by (ranks from here on, replicas)."""

    ranks: int
    loads: tuple[Load, ...]
    index: Mapping[tuple[int, int], int]
    """The place in `loads`."""
    update_interval: int | None = None
    """That of an asynchronous schedule with these loads; None: the one that the schedule has by itself."""
    busy: int | None = None
    """Ranks from a stage on that its depth keeps busy, at most; None: all of them."""

    def depth(self, kind: ScheduleKind, replicas: Sequence[int]) -> tuple[int, ...]:
        """Of each stage; empty: the schedule's own."""
        return () if self.busy is None else shallow_depth(kind, replicas, self.busy)


def shallow_depth(kind: ScheduleKind, replicas: Sequence[int], busy: int) -> tuple[int, ...]:
    """As many forwards ahead as keep so many ranks busy, or more where a later stage would wait for ever."""
    behind = (min(sum(replicas[stage:]), busy) for stage in range(len(replicas)))
    depth = [max(0, own - 1) // count for own, count in zip(behind, replicas, strict=True)]
    while (found := too_shallow(replicas, depth, joint=not kind.synchronous)) is not None:
        stage, _, least = found
        depth[stage] = least
    return tuple(depth)


def loads_by_place(kind: ScheduleKind, ranks: int, minibatches: int, busy: int | None = None) -> Loads:
    """Any replicas on any stage; `minibatches` of a synchronous update."""
    interval = planned_interval(kind, ranks)
    places = {
        (behind, replicas): load_at(kind, ranks, behind, replicas, minibatches, interval, busy)
        for behind in range(1, ranks + 1)
        for replicas in range(1, min(behind, minibatches) + 1)
    }
    return _numbered(ranks, places, stated_interval(kind, ranks), busy)


def equal_loads(
    kind: ScheduleKind, ranks: int, replicas: int, minibatches: int, busy: int | None = None
) -> Loads:
    """The same with so many replicas on every stage, which may make gradients fresh."""
    fresh = not kind.synchronous and planned_interval(kind, ranks, replicas) == replicas
    interval, places = planned_interval(kind, ranks), {}
    for behind in range(replicas, ranks + 1, replicas):
        load = load_at(kind, ranks, behind, replicas, minibatches, interval, busy)
        places[behind, replicas] = load._replace(fresh=fresh)
    return _numbered(ranks, places, stated_interval(kind, ranks), busy)


def load_at(
    kind: ScheduleKind,
    ranks: int,
    behind: int,
    replicas: int,
    minibatches: int,
    interval: int,
    busy: int | None,
) -> Load:
    assert kind.holding is not None
    assert not kind.splits_backward
    own = -(-minibatches // replicas)
    ahead = ranks if busy is None else min(ranks, busy)
    held = kind.holding(ahead, min(behind, max(ahead, replicas)), replicas, own, interval)
    if kind.synchronous:
        return Load(replicas, held.in_flight, 1, 0, False, own)
    per_update = max(interval, replicas) / replicas
    alone = replicas == ranks == interval
    return Load(replicas, held.in_flight, held.versions, 0, False, per_update, held.lag, fresh=alone)


def planned_interval(kind: ScheduleKind, ranks: int, replicas: int = 1) -> int:
    """The update interval that is planned for: that of a stage on each rank, or more where replicas need it."""
    usual = kind.interval((1,) * ranks, None, None)
    return usual if replicas == 1 else kind.interval((replicas,) * (ranks // replicas), None, usual)


def stated_interval(kind: ScheduleKind, ranks: int) -> int | None:
    if kind.synchronous or planned_interval(kind, ranks) == 1:
        return None
    return planned_interval(kind, ranks)


def line_loads(schedule: Schedule, busy: int | None = None) -> Loads:
    """Those of a whole schedule with its stages in line."""
    behind, places = schedule.num_ranks, {}
    for load in schedule_loads(schedule):
        places[behind, load.replicas] = load
        behind -= load.replicas
    interval = None if schedule.synchronous else schedule.update_interval
    return _numbered(schedule.num_ranks, places, interval, busy)


def in_line(schedule: Schedule) -> bool:
    """Whether each stage has ranks of its own, numbered stage by stage."""
    return in_order(schedule.placement)


@lru_cache(maxsize=512)
def schedule_loads(schedule: Schedule) -> tuple[Load, ...]:
    """The load of each stage, read from the programs."""
    shown, interval, fresh = sample(schedule), schedule.update_interval, fresh_gradients(schedule)
    versions = [1] * schedule.num_stages
    if not schedule.synchronous:
        versions = [held.versions for held in holdings(shown)]
    loads = []
    for ranks, live, most in zip(shown.placement, versions, _counts(shown), strict=True):
        own = -(-interval // len(ranks)) if schedule.synchronous else max(1.0, interval / len(ranks))
        loads.append(
            Load(len(ranks), most.in_flight, live, most.waiting, most.split, own, schedule.lag, fresh)
        )
    return tuple(loads)


@dataclass
class _Count:
    """The most minibatches of a rank of a stage before and behind their I, while one runs F, B or I."""

    in_flight: int = 0
    waiting: int = 0
    split: bool = False


def _counts(schedule: Schedule) -> list[_Count]:
    F, B, I, W = Op.F, Op.B, Op.I, Op.W  # noqa: E741 (members are slow to look up)
    found = [_Count() for _ in range(schedule.num_stages)]
    for rank in range(schedule.num_ranks):
        now = {stage: [0, 0] for stage in schedule.stages_of(rank)}
        for stage, op, _ in schedule.program(rank):
            most, own = found[stage], now[stage]
            if op is F:
                own[0] += 1
            if op is F or op is I:
                if own[0] > most.in_flight:
                    most.in_flight = own[0]
                if own[1] > most.waiting:
                    most.waiting = own[1]
            if op is I or op is B:
                own[0] -= 1
            if op is I:
                own[1] += 1
                most.split = True
            elif op is W:
                own[1] -= 1
    return found


def _numbered(
    ranks: int, places: Mapping[tuple[int, int], Load], update_interval: int | None, busy: int | None
) -> Loads:
    numbers: dict[Load, int] = {}
    index = {place: numbers.setdefault(load, len(numbers)) for place, load in places.items()}
    return Loads(ranks, tuple(numbers), index, update_interval, busy)
