"""The search by simulation where ranks hold several stages: few partitions in the order of bounds, else uphill."""

from __future__ import annotations

from dataclasses import replace
from math import comb, inf
from typing import NamedTuple

import numpy as np

from vpipe.plan.by_simulation import EACH, EFFORT, MOST, ROUNDING, neighbours
from vpipe.plan.chunks import ChunkHoldings, PositionHolding
from vpipe.plan.paths import Cuts, Paths, PipelineFacts, all_cuts
from vpipe.plan.result import PlanResult, assemble, simulated_seconds
from vpipe.plan.sums import Floats
from vpipe.plan.task import Task, divisors, schedule_of, weights_alone
from vpipe.schedule import Schedule


class _Layout(NamedTuple):
    """A schedule over so many positions, and what its ranks would hold."""

    schedule: Schedule
    holdings: ChunkHoldings


class ChunkedSearch:
    def __init__(self, task: Task) -> None:
        self.task = task
        self.paths = Paths(task.profile)
        self.effort = EFFORT
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
            layout = _Layout(schedule, ChunkHoldings(task.profile, schedule, task.memory))
            if comb(blocks - 1, stages - 1) <= MOST:
                self.in_order(layout, all_cuts(blocks, stages))
            else:
                self.climb(layout)
        if self.best is None:
            return None
        gap = self.best.seconds / self.proven - 1
        return replace(self.best, gap=gap if gap > 1e-6 else None)

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

    def climb(self, layout: _Layout) -> None:
        found = layout.holdings.search()
        self.proven = min(self.proven, self.of_any_partition(layout.schedule))
        if any(holding.missing for holding in found):
            return
        starts = sorted(piece.start for holding in found for piece in holding.slices)
        cuts = np.array([*starts, len(self.task.profile.blocks)])
        improved = self.settle(layout, cuts)
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
        shared = task.profile.device.shared_by > 1 < task.profile.device.crowding
        self.effort -= (EACH + 2 * task.simulated * schedule.num_stages) * (3 if shared else 1)
        interval = None if task.kind.synchronous else schedule.update_interval
        result = assemble(task, len(found[0].slices), interval, found)
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
        return PipelineFacts(
            kind.synchronous, kind.splits_backward, minibatches, tuple(map(len, schedule.placement)), None
        )

    def bounds(self, schedule: Schedule, cuts: Cuts) -> Floats:
        """The work of the busiest rank, and the way of one minibatch through all stages and back."""
        facts = self.facts(schedule)
        times = self.paths.times(facts, cuts)
        work = times.forward + times.backward + times.weights
        least = np.zeros(len(cuts))
        for ranks in set(schedule.placement):
            own = [stage for stage, holders in enumerate(schedule.placement) if holders == ranks]
            busy = work[:, own].sum(axis=1) * facts.own(own[0]) if facts.synchronous else 0.0
            least = np.maximum(least, busy + times.update[:, own].sum(axis=1))
        moved = [one != other for one, other in zip(schedule.placement, schedule.placement[1:], strict=False)]
        there = (times.forward + times.backward).sum(axis=1)
        if not self.paths.busy:
            there = there + 2 * (times.hop * np.array(moved, dtype=float)).sum(axis=1)
        if facts.synchronous:
            least = np.maximum(least, there)
        return np.asarray(self.paths.alone * least / facts.minibatches)

    def of_any_partition(self, schedule: Schedule) -> float:
        total = float(self.paths.forward[-1] + self.paths.backward[-1])
        return self.paths.alone * total / schedule.num_ranks
