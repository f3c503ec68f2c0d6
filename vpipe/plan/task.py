"""The task of the planner, and the layouts that its schedule may have: loads by place, or holdings by position."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from vpipe.cost import Profile, as_scheduled, shared_ranks
from vpipe.plan.chunks import PositionHolding, search_chunks
from vpipe.plan.loads import (
    Loads,
    equal_loads,
    in_line,
    line_loads,
    loads_by_place,
    planned_interval,
    shallow_depth,
)
from vpipe.plan.paths import compositions
from vpipe.schedule import Schedule, ScheduleKind
from vpipe.simulate.simulation import ITERATIONS

LONG = 6
"""Rounds of minibatches after which a synchronous step only gets longer by the slowest rank's time."""
MANY_RANKS = 6
FEW_RANKS = 4
SMALL = 1000
"""Ranks times blocks."""
FEW_BLOCKS = 9


class Task(NamedTuple):
    """What is to be planned; the profile is that of the batch size in question."""

    profile: Profile
    ranks: int
    memory: int
    kind: ScheduleKind
    minibatches: int | None
    chunks: int | None
    given: Profile | None = None
    """The same profile, not yet changed for the schedule: what is simulated."""
    stages: int | None = None
    """Positions of the pipeline; None: as many as are fastest."""
    interval: int | None = None
    """Minibatches of an asynchronous update; None: as few as the schedule needs."""
    by_loss: bool = False
    """Whether plans are chosen by their time to a loss, for which stale weights need more samples."""
    all_ranks: bool = False
    """Whether no rank may be left idle."""
    searches: int = 1
    """Schedules that are compared; those of a large problem share the effort of one search."""

    @property
    def update(self) -> int:
        """Minibatches of a synchronous update."""
        table = self.kind.table
        return (table.minibatches if table else self.minibatches) or 4 * self.ranks

    @property
    def simulated(self) -> int:
        """As many minibatches of a synchronous update as tell plans apart."""
        return self.update if self.kind.table else min(self.update, LONG * max(16, self.ranks))

    @property
    def update_interval(self) -> int:
        """Minibatches of an update of this schedule."""
        if self.kind.table is not None:
            return self.kind.table.update_interval
        return (
            self.update if self.kind.synchronous else self.interval or planned_interval(self.kind, self.ranks)
        )

    @property
    def in_line(self) -> bool:
        """Whether each rank holds one stage."""
        return self.kind.holding is not None or in_line(schedule_of(self, 1 if self.ranks == 1 else 2, 1))

    def with_ranks(self, ranks: int) -> Task:
        """The same on fewer ranks, with as many minibatches of a synchronous update."""
        minibatches = self.update if self.kind.synchronous else self.minibatches
        return self._replace(ranks=ranks, minibatches=minibatches).scheduled()

    def with_idle_ranks(self) -> Iterator[Task]:
        """The task itself, and on fewer ranks where some may be idle."""
        yield self
        for ranks in range(self.ranks - 1, 0, -1) if self.may_idle else ():
            yield self.with_ranks(ranks)

    def with_interval(self, interval: int | None) -> Task:
        return self._replace(interval=interval).scheduled()

    def scheduled(self) -> Task:
        """With the profile as it is under this schedule."""
        given = self.given or self.profile
        return self._replace(
            profile=as_scheduled(given, self.kind.splits_backward, self.update_interval), given=given
        )

    @property
    def may_idle(self) -> bool:
        """Whether there is time to look at plans that leave ranks idle, and whether they are wanted."""
        return self.small and self.stages is None and self.kind.table is None and not self.all_ranks

    def allows(self, replicas: Sequence[int]) -> bool:
        """Whether the schedule may have such replicas."""
        kind = self.kind
        if (kind.replicas == "one" and max(replicas) > 1) or (
            kind.replicas == "equal" and len(set(replicas)) > 1
        ):
            return False
        return not kind.synchronous or max(replicas) <= self.update

    @property
    def counts(self) -> range:
        """The numbers of positions that a plan in line may have."""
        if self.stages is not None:
            return range(self.stages, self.stages + 1)
        return range(1, min(self.ranks, len(self.profile.blocks)) + 1)

    @property
    def small(self) -> bool:
        """Whether there is time to look for the very smallest change that would fit."""
        return self.ranks * len(self.profile.blocks) <= SMALL

    @property
    def walks(self) -> int:
        """How often a simulation walks through the schedule: more than once where ranks slow each other down."""
        return 1 + ITERATIONS * bool(shared_ranks(self.profile, self.ranks))

    @property
    def few(self) -> bool:
        """Whether there are so few blocks and ranks that every plan can be looked at."""
        return len(self.profile.blocks) <= FEW_BLOCKS and self.ranks <= FEW_RANKS

    @property
    def quick(self) -> bool:
        """Whether there is time to try other ranks and batch sizes."""
        return self.kind.table is None and (self.small or self.in_line)


def divisors(task: Task) -> list[int]:
    """The numbers of positions that leave equally many replicas to each, at most one for each minibatch."""
    if task.kind.table is not None:
        return [len(set(task.kind.table.placement))]
    if task.kind.replicas == "one":
        return [task.ranks]
    return [
        positions
        for positions in task.counts
        if task.ranks % positions == 0 and task.ranks // positions <= task.update
    ]


def schedule_of(task: Task, positions: int, replicas: int | None = None) -> Schedule:
    """The schedule with equally many replicas on each of these positions; a table is as it is."""
    count = task.ranks // positions if replicas is None else replicas
    minibatches = task.update if task.kind.synchronous else None
    return _built(task.kind, positions, count, minibatches, task.chunks if task.kind.any_chunks else None)


@lru_cache(maxsize=64)
def _built(
    kind: ScheduleKind, positions: int, replicas: int, minibatches: int | None, chunks: int | None
) -> Schedule:
    return kind.build(positions, minibatches, chunks=chunks, replicas=[replicas] * positions)


def loads_of(task: Task, busy: int | None = None) -> Iterable[Loads]:
    """The layouts with a stage on each rank; with `busy`, those with less depth: so many ranks are kept busy."""
    kind = task.kind
    if task.stages is not None and kind.table is None:
        counts = _replicas_of_stages(task, task.stages)
        return [_line_loads(task, replicas, busy) for replicas in counts if task.allows(replicas)]
    if kind.holding is None:
        if kind.table is not None:
            return [line_loads(kind.table)]
        equal = [(task.ranks // positions,) * positions for positions in divisors(task)]
        uneven = _uneven_replicas(task) if kind.replicas == "any" and task.ranks <= MANY_RANKS else ()
        return [_line_loads(task, replicas, busy) for replicas in (*equal, *uneven)]
    # Among equal replicas gradients are fresh, which needs less memory.
    equal_counts = divisors(task)[::-1] if updates_at_once(task) else []
    return [
        *(
            equal_loads(kind, task.ranks, task.ranks // positions, task.update, busy)
            for positions in equal_counts
        ),
        loads_by_place(kind, task.ranks, task.update, busy),
    ]


def least_loads_of(task: Task) -> Iterable[Loads]:
    """Those that need least memory: where depths may be chosen, with one minibatch in flight."""
    return loads_of(task, 1 if task.kind.any_depth else None)


def _line_loads(task: Task, replicas: Sequence[int], busy: int | None) -> Loads:
    """Those of a whole schedule."""
    minibatches = task.update if task.kind.synchronous else None
    depth = None if busy is None else shallow_depth(task.kind, replicas, busy)
    return line_loads(task.kind.build(len(replicas), minibatches, replicas=replicas, depth=depth), busy)


def _replicas_of_stages(task: Task, stages: int) -> Iterable[tuple[int, ...]]:
    """Of so many stages; of many ranks only the most even ones."""
    each, more = divmod(task.ranks, stages)
    even = [(each + 1,) * more + (each,) * (stages - more)]
    return compositions(task.ranks, stages) if task.ranks <= MANY_RANKS else even


def _uneven_replicas(task: Task) -> Iterable[tuple[int, ...]]:
    """Those of stages that differ in their replicas."""
    for stages in range(2, min(task.ranks, len(task.profile.blocks)) + 1):
        for replicas in compositions(task.ranks, stages):
            if len(set(replicas)) > 1 and max(replicas) <= task.update:
                yield replicas


def updates_at_once(task: Task) -> bool:
    """Whether an update follows every minibatch of a rank, if all stages have as many replicas."""
    return not task.kind.synchronous and task.update_interval == 1


def equal_loads_of(task: Task) -> Iterable[Loads]:
    """Of schedules whose stages may differ in their replicas: a stage for each rank, and one stage on all ranks.

    By sums uneven replicas make stages of equal length. But they wait for each other, which only a simulation tells,
    and then one of these may be quicker. Asynchronous replicas wait in any case.
    """
    if task.kind.holding is None or updates_at_once(task) or task.stages is not None:
        return []
    ends = {task.ranks, 1} if task.kind.synchronous else {task.ranks}
    if task.profile.hosts is not None:  # what replicas cost depends on where they are, which sums do not know
        room = max(map(len, task.profile.hosts.ranks))
        ends |= set(divisors(task)) if task.small else {task.ranks // max(1, room // 2)}
    return [
        equal_loads(task.kind, task.ranks, task.ranks // positions, task.update)
        for positions in divisors(task)
        if positions in ends
    ]


def holdings_of(task: Task, positions: int) -> list[PositionHolding]:
    return search_chunks(task.profile, schedule_of(task, positions), task.memory)


def weights_alone(task: Task, positions: int) -> float:
    """What a rank holds at least, however the blocks are cut: its share of weights, gradients, optimizer state."""
    return (
        task.profile.parameter_bytes(0, len(task.profile.blocks))
        * (2 + task.profile.optimizer_ratio)
        / positions
    )
