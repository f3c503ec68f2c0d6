"""The task of the planner, and the layouts that its schedule may have: loads by place, or holdings by position."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from vpipe.cost import Profile
from vpipe.plan.chunks import PositionHolding, search_chunks
from vpipe.plan.loads import Loads, equal_loads, in_line, line_loads, loads_by_place, planned_interval
from vpipe.plan.paths import compositions
from vpipe.schedule import Schedule, ScheduleKind

LONG = 6
"""Rounds of minibatches after which a synchronous step only gets longer by the slowest rank's time."""
FEW_RANKS = 6
SMALL = 1000
"""Ranks times blocks."""


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
        return self.update if self.kind.synchronous else planned_interval(self.kind, self.ranks)

    @property
    def in_line(self) -> bool:
        """Whether each rank holds one stage."""
        return self.kind.holding is not None or in_line(schedule_of(self, 1 if self.ranks == 1 else 2, 1))

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


def loads_of(task: Task) -> Iterable[Loads]:
    """The layouts with a stage on each rank."""
    kind = task.kind
    if task.stages is not None and kind.table is None:
        return list(_loads_of_stages(task, task.stages))
    if kind.holding is None:
        loads = [line_loads(schedule_of(task, positions)) for positions in divisors(task)]
        return [*loads, *_uneven_loads(task)] if kind.replicas == "any" and task.ranks <= FEW_RANKS else loads
    # Among equal replicas gradients are fresh, which needs less memory.
    equal = divisors(task)[::-1] if updates_at_once(task) else []
    return [
        *(equal_loads(kind, task.ranks, task.ranks // positions, task.update) for positions in equal),
        loads_by_place(kind, task.ranks, task.update),
    ]


def _loads_of_stages(task: Task, stages: int) -> Iterable[Loads]:
    """Those with so many stages: of many ranks only the most even replicas."""
    minibatches = task.update if task.kind.synchronous else None
    each, more = divmod(task.ranks, stages)
    even = [(each + 1,) * more + (each,) * (stages - more)]
    for replicas in compositions(task.ranks, stages) if task.ranks <= FEW_RANKS else even:
        if task.allows(replicas):
            yield line_loads(task.kind.build(stages, minibatches, replicas=replicas))


def _uneven_loads(task: Task) -> Iterable[Loads]:
    """Those of stages that differ in their replicas, where they are known of whole schedules only."""
    minibatches = task.update if task.kind.synchronous else None
    for stages in range(2, min(task.ranks, len(task.profile.blocks)) + 1):
        for replicas in compositions(task.ranks, stages):
            if len(set(replicas)) > 1 and max(replicas) <= task.update:
                yield line_loads(task.kind.build(stages, minibatches, replicas=replicas))


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
