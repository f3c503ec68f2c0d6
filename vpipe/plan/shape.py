"""The shape of a plan: schedule, replicas, depth and ranks, with the blocks of its stages still open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from vpipe.plan.loads import planned_interval, schedule_loads, stated_interval
from vpipe.plan.model import Load, Slice
from vpipe.plan.paths import Counts, PipelineFacts
from vpipe.plan.placed_links import any_links, placed_links
from vpipe.plan.task import Task
from vpipe.schedule import Schedule, ScheduleKind
from vpipe.schedule.program import Placement
from vpipe.schedule.staircase import depths

WORTH = 1.01
"""Times faster that a plan must be if its depth makes weights older, where plans are chosen by their time to a loss;
of large problems, which have no time for less, with any depth but the schedule's own."""
SAMPLES_WORTH = 1.001
"""The same where they are chosen by samples a second."""
ANY_WORTH = 1 + 1e-6
"""The same of any other depth than the schedule's own."""


@dataclass(frozen=True)
class PlanShape:
    """A schedule with its replicas, its depth and its ranks; the blocks of its stages are still open."""

    task: Task
    replicas: tuple[int, ...]
    depth: tuple[int, ...] | None = None
    placement: Placement | None = None
    """The ranks of each stage; None: they are still open."""

    @cached_property
    def interval(self) -> int | None:
        """That a plan states; None: the one that the schedule has by itself."""
        kind = self.task.kind
        stated = self.task.interval or stated_interval(kind, self.task.ranks)
        return None if stated is None else max(stated, kind.interval(self.replicas, self.depth, None))

    @cached_property
    def schedule(self) -> Schedule:
        """With ranks numbered stage by stage."""
        minibatches = self.task.simulated if self.task.kind.synchronous else None
        return _built(self.task.kind, self.replicas, minibatches, self.interval, self.depth)

    @cached_property
    def loads(self) -> tuple[Load, ...]:
        loads, kind, ranks = schedule_loads(self.schedule), self.task.kind, self.task.ranks
        if kind.synchronous or kind.holding is None or self.depth is not None:
            return loads
        # As `advice.py` counts it, for any stages: what is refused and what is advised must agree.
        lag = kind.holding(ranks, ranks, 1, 1, planned_interval(kind, ranks)).lag
        return tuple(load._replace(lag=max(lag, load.lag)) for load in loads)

    @cached_property
    def facts(self) -> PipelineFacts:
        facts = self.any_depth
        if not self.task.kind.any_depth:
            return facts._replace(in_flight=tuple(load.in_flight for load in self.loads))
        usual = depths(self.replicas)
        return self.with_depths(np.array(self.depth or usual))

    def with_depths(self, depth: Counts) -> PipelineFacts:
        """With this depth; or with any of these, a row for each."""
        facts = self.any_depth
        if facts.synchronous:
            depth = np.minimum(depth, [facts.own(stage) - 1 for stage in range(len(self.replicas))])
        return facts._replace(in_flight=depth + 1)

    @cached_property
    def any_depth(self) -> PipelineFacts:
        kind, interval, profile = self.task.kind, self.schedule.update_interval, self.task.profile
        if self.placement is None:
            links = any_links(profile, self.replicas)
        else:
            links = placed_links(profile, self.placement, interval if kind.synchronous else None)
        return PipelineFacts(kind.synchronous, kind.splits_backward, interval, self.replicas, None, links)

    @property
    def worth(self) -> float:
        """What its time counts, times itself."""
        if self.depth is None:
            return 1.0
        older = any(ahead > own for ahead, own in zip(self.depth, depths(self.replicas), strict=True))
        if not self.task.small:
            return WORTH
        if self.task.kind.synchronous or not older:
            return ANY_WORTH
        return WORTH if self.task.by_loss else SAMPLES_WORTH

    def slices(self, cuts: Sequence[int]) -> list[Slice]:
        ranks, found = self.schedule.placement, []
        for stage, own in enumerate(ranks):
            before = ranks[stage - 1][-1] if stage else None
            after = ranks[stage + 1][0] if stage + 1 < len(ranks) else None
            found.append(Slice(cuts[stage], cuts[stage + 1], self.loads[stage], own, before, after))
        return found


@lru_cache(maxsize=512)
def _built(
    kind: ScheduleKind,
    replicas: tuple[int, ...],
    minibatches: int | None,
    interval: int | None,
    depth: tuple[int, ...] | None,
) -> Schedule:
    return kind.build(len(replicas), minibatches, replicas=replicas, update_interval=interval, depth=depth)
