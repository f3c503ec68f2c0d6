"""The search by simulation where ranks hold several stages: few partitions in the order of bounds, else uphill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import comb, inf
from typing import NamedTuple

import numpy as np

from vpipe.plan.by_simulation import MOST, PLACED, neighbours
from vpipe.plan.chunks import ChunkHoldings, PositionHolding
from vpipe.plan.paths import Cuts, Paths, PipelineFacts, all_cuts
from vpipe.plan.placed_links import placed_links
from vpipe.plan.placements import placements
from vpipe.plan.result import PlanResult, assemble, simulated_seconds
from vpipe.plan.sums import Floats
from vpipe.plan.task import Task, divisors, schedule_of, weights_alone
from vpipe.plan.trials import EACH, ROUNDING, effort_of
from vpipe.schedule import Schedule
from vpipe.schedule.program import Placement, renumbered


class _Layout(NamedTuple):
    """A schedule over so many positions, what its ranks would hold, and which ranks those are."""

    schedule: Schedule
    holdings: ChunkHoldings
    placement: Placement | None
    """Of each position; None: as a table has it."""


class ChunkedSearch:
    def __init__(self, task: Task) -> None:
        self.task = task
        self.paths = Paths(task.profile)
        self.effort = effort_of(task) * (PLACED if task.small and task.profile.hosts is not None else 1)
        self.best: PlanResult | None = None
        self.proven = inf
        """What no partition can be faster than that was not looked at."""

    def run(self, limit: float) -> PlanResult | None:
        task = self.task
        self.limit = inf if task.simulated < task.update else limit / ROUNDING**3 + 1e-12
        for positions in divisors(task):
            schedule = schedule_of(task, positions)
            blocks, stages = len(task.profile.blocks), schedule.num_stages
            if weights_alone(task, positions) > task.memory or stages > blocks:
                continue
            holdings = ChunkHoldings(task.profile, schedule, task.memory)
            few = comb(blocks - 1, stages - 1) <= MOST
            start = None if few else self.start(holdings)
            found, complete = self.placements(schedule)
            if not complete or not few:
                self.proven = min(self.proven, self.of_any_partition(schedule))
            for placement in found:
                placed = schedule if placement is None else renumbered(schedule, placement)
                layout = _Layout(placed, holdings, placement)
                if few:
                    self.in_order(layout, all_cuts(blocks, stages))
                elif start is not None and (self.effort > 0 or placement is found[0]):
                    self.climb(layout, start)
        if self.best is None:
            return None
        gap = self.best.seconds / self.proven - 1
        return replace(self.best, gap=gap if gap > 1e-6 else None)

    def placements(self, schedule: Schedule) -> tuple[Sequence[Placement | None], bool]:
        if self.task.kind.table is not None:
            return [None], True
        replicas = [len(ranks) for ranks in dict.fromkeys(schedule.placement)]
        return placements(self.task.profile, replicas)

    @property
    def value(self) -> float:
        return min(self.limit, inf if self.best is None else self.best.seconds)

    def in_order(self, layout: _Layout, cuts: Cuts) -> None:
        bounds = self.bounds(layout.schedule, cuts)
        for place in np.argsort(bounds, kind="stable"):
            if bounds[place] >= self.value * ROUNDING:
                break
            if self.effort <= 0:
                self.proven = min(self.proven, float(bounds[place]))
                break
            self.settle(layout, cuts[place])

    def start(self, holdings: ChunkHoldings) -> Cuts | None:
        """The cuts that sums find; None: nothing fits."""
        found = holdings.search()
        if any(holding.missing for holding in found):
            return None
        starts = sorted(piece.start for holding in found for piece in holding.slices)
        return np.array([*starts, len(self.task.profile.blocks)])

    def climb(self, layout: _Layout, cuts: Cuts) -> None:
        bound = self.bounds(layout.schedule, cuts[None, :])[0]
        improved = bound < self.value * ROUNDING and self.settle(layout, cuts)
        while improved and self.effort > 0:
            improved = False
            near = neighbours(cuts)
            bounds = self.bounds(layout.schedule, near) if len(near) else np.zeros(0)
            for place in np.argsort(bounds, kind="stable"):
                if bounds[place] >= self.value * ROUNDING or self.effort <= 0:
                    break
                if improved := self.settle(layout, near[place]):
                    cuts = near[place]
                    break

    def settle(self, layout: _Layout, cuts: Cuts) -> bool:
        """Simulate a partition; whether it is better than all before."""
        task, schedule = self.task, layout.schedule
        found: list[PositionHolding] = []
        for position in range(len(layout.holdings.stages)):
            found.append(layout.holdings.holding(position, cuts.tolist()))
            if found[-1].missing:
                return False
        self.effort -= (EACH + 2 * task.simulated * schedule.num_stages) * task.walks
        interval = None if task.kind.synchronous else schedule.update_interval
        result = assemble(task, len(found[0].slices), interval, found, layout.placement)
        result = replace(result, seconds=simulated_seconds(task, result, task.simulated))
        if result.seconds > self.value / ROUNDING or (
            self.best and result.seconds >= self.best.seconds * ROUNDING
        ):
            return False
        self.best = result
        return True

    def facts(self, schedule: Schedule) -> PipelineFacts:
        kind = self.task.kind
        minibatches = self.task.simulated if kind.synchronous else schedule.update_interval
        counts = tuple(map(len, schedule.placement))
        links = placed_links(self.task.profile, schedule.placement, minibatches if kind.synchronous else None)
        return PipelineFacts(kind.synchronous, kind.splits_backward, minibatches, counts, None, links)

    def bounds(self, schedule: Schedule, cuts: Cuts) -> Floats:
        """The work of the busiest rank, and the way of one minibatch through all stages and back."""
        facts = self.facts(schedule)
        times = self.paths.times(facts, cuts)
        work, once = times.forward + times.backward + times.weights, times.update + times.near
        least = np.zeros(len(cuts))
        for ranks in set(schedule.placement):
            own = [stage for stage, holders in enumerate(schedule.placement) if holders == ranks]
            busy = work[:, own].sum(axis=1) * facts.own(own[0]) if facts.synchronous else 0.0
            least = np.maximum(least, busy + once[:, own].sum(axis=1))
        if facts.synchronous:
            least = np.maximum(
                least, (times.forward + times.backward).sum(axis=1) + 2 * times.hop.sum(axis=1)
            )
            if times.carried.shape[1]:
                least = np.maximum(least, facts.minibatches * times.carried.max(axis=1))
        return np.asarray(self.paths.alone * least / facts.minibatches)

    def of_any_partition(self, schedule: Schedule) -> float:
        total = float(self.paths.forward[-1] + self.paths.backward[-1])
        return self.paths.alone * total / schedule.num_ranks
