"""The search by simulation: the plan that takes least time, or the best that was found and how far off it may be.

What a step takes depends on links and on who waits for whom, which sums over stages do not know. So each partition with
its replicas, its placement on hosts and its depth has a lower bound (`paths.py`), and they are simulated in the order
of these bounds, until no bound is below the best time. Where there are too many of them, or `EFFORT` is spent, the
plans that the sums found are improved cut by cut, and `gap` says how far the result may be from the best.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import accumulate, chain, zip_longest
from math import comb, inf
from typing import NamedTuple

import numpy as np

from vpipe.plan.frontier import FEW, policy_choice
from vpipe.plan.other_cuts import elsewhere, neighbours
from vpipe.plan.paths import Cuts, PipelineFacts, all_cuts, compositions
from vpipe.plan.result import PlanResult
from vpipe.plan.shape import WORTH, PlanShape
from vpipe.plan.task import Task
from vpipe.plan.trials import EFFORT, ROUNDING, Trials, effort_of
from vpipe.schedule.kind import too_shallow
from vpipe.schedule.staircase import depths

MOST = 20_000
"""Partitions, with replicas, that are looked at one by one."""
THOROUGH = 3
"""Times the effort where every plan is looked at."""
PLACED = 4
"""Times the effort where ranks are on several hosts and every partition is looked at."""
MORE = 0.4
"""Of the effort, in addition, for plans of few stages, and as much for cuts elsewhere, where not all are looked at."""
REGULAR = 4
"""Placements on which a plan by sums is simulated."""


class Entry(NamedTuple):
    """A partition in the order of the search; a shape without ranks stands for all placements."""

    key: float
    """Its bound times what a depth must be worth."""
    bound: float
    shape: PlanShape
    cuts: Cuts
    open_depth: bool
    """Whether it stands for all depths but the schedule's own."""


class SimulatedSearch(Trials):
    """The search for stages in line: one on each rank."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.blocks = len(task.profile.blocks)
        self.started: list[tuple[PlanShape, Cuts]] = []
        """Where a climb begins."""
        self.every_depth = False
        """Whether all depths are looked at, if they are not too many, instead of some that are likely to suit."""

    def run(self, starts: Iterable[PlanResult], limit: float) -> PlanResult | None:
        """`starts`: plans by sums; `limit`: a plan that takes longer is of no use."""
        # What another depth must be faster by is no part of the limit.
        self.limit = inf if self.task.simulated < self.task.update else limit * WORTH / ROUNDING**3 + 1e-12
        for start in starts:
            self.begin(start)
        if self.count() <= MOST:
            self.effort *= 1 if self.task.profile.hosts is None else PLACED
            proven = self.in_order(self.entries())
            self.step_depths()
            # Where ranks share a device, times differ by more than such depths do.
            if self.task.few and self.task.kind.any_depth and self.task.walks == 1:
                self.every_depth, self.effort, self.doubted = True, EFFORT * THOROUGH, inf
                proven = self.in_order(self.entries())
        else:
            proven = self.climb()
        if self.best is None:
            return None
        gap = self.best.seconds / proven - 1 if proven else inf
        return replace(self.result(self.best), gap=None if gap <= 1e-6 else gap)

    def shapes(self, counts: Iterable[int]) -> Iterator[PlanShape]:
        """With so many stages; a table has its own."""
        task = self.task
        if task.kind.table is not None:
            yield self.shape(tuple(map(len, task.kind.table.placement)))
            return
        for stages in counts:
            for replicas in compositions(task.ranks, stages):
                if task.allows(replicas):
                    yield self.shape(replicas)

    def count(self) -> int:
        """Partitions with all replicas, at most."""
        return sum(map(self.count_of, self.task.counts))

    def count_of(self, stages: int) -> int:
        return comb(self.blocks - 1, stages - 1) * comb(self.task.ranks - 1, stages - 1)

    @property
    def complete(self) -> bool:
        """Whether it looks at all partitions and all policies, and needs no start."""
        return self.blocks <= FEW and self.count() <= MOST

    # In the order of the bounds

    def entries(self) -> list[Entry]:
        found: list[Entry] = []
        for shape in self.shapes(self.task.counts):
            cuts = all_cuts(self.blocks, len(shape.replicas))
            found += self.of_shape(shape, cuts, shape.facts, False)
            if self.task.kind.any_depth and len(shape.replicas) > 1:
                found += self.of_shape(shape, cuts, shape.any_depth, True)
        return found

    def of_shape(self, shape: PlanShape, cuts: Cuts, facts: PipelineFacts, open_depth: bool) -> list[Entry]:
        bounds, worth = self.keys(self.paths.bounds(facts, cuts)).tolist(), 1.0 if open_depth else shape.worth
        return [
            Entry(worth * bound, bound, shape, row, open_depth)
            for bound, row in zip(bounds, cuts, strict=True)
        ]

    def in_order(self, entries: list[Entry]) -> float:
        """What no plan can be faster than, as far as it is proven."""
        heap = [(entry.key, number, entry) for number, entry in enumerate(entries)]
        number = len(heap)
        heapify(heap)
        while heap and self.effort > 0:
            key, _, entry = heappop(heap)
            if key >= self.bar:
                break
            if entry.shape.placement is not None and not entry.open_depth:
                self.settle(entry.shape, entry.cuts)
                continue
            for more in self.expand(entry):
                number += 1
                heappush(heap, (more.key, number, more))
        if self.effort > 0:
            return min(self.doubted, inf if self.best is None else self.best.seconds)
        left = min((entry.bound for _, _, entry in heap), default=inf)
        return min(left, self.doubted, inf if self.best is None else self.best.seconds)

    def look_at_few_stages(self, until: float) -> None:
        """Simulate plans with so few stages that all of these can be put in order, as long as more than so much effort
        is left: of each number of replicas the one with the least bound, then the next of each.

        Sums do not know that replicas wait for each other, nor how long messages are on their way: of large problems
        they may miss two or three stages with many replicas.
        """
        if self.task.kind.table is not None or self.task.profile.hosts is not None:
            return
        totals = accumulate(map(self.count_of, self.task.counts))
        few = [stages for stages, total in zip(self.task.counts, totals, strict=True) if total <= MOST]
        ordered = []
        for shape in self.shapes(few):
            found = self.of_shape(shape, all_cuts(self.blocks, len(shape.replicas)), shape.facts, False)
            ordered.append(sorted(found, key=lambda entry: entry.key))
        for entry in chain.from_iterable(zip_longest(*ordered)):
            if self.effort <= until:
                break
            if entry is not None and entry.key < self.bar:
                self.settle(entry.shape, entry.cuts)

    def expand(self, entry: Entry) -> Iterator[Entry]:
        """The placements or, of a shape that has one, the depths that an entry stands for."""
        shape = entry.shape
        if shape.placement is not None:
            found, complete = self.depths(shape, entry.cuts)
            yield from found
        else:
            placed, complete = self.placements(shape.replicas)
            for placement in placed:
                other = self.shape(shape.replicas, shape.depth, placement)
                facts = other.any_depth if entry.open_depth else other.facts
                yield from self.of_shape(other, entry.cuts[None, :], facts, entry.open_depth)
        if not complete:
            self.doubted = min(self.doubted, entry.bound)

    def depths(self, shape: PlanShape, cuts: Cuts) -> tuple[list[Entry], bool]:
        """Those of other depths than the schedule's own that may be of use, and whether no other may."""
        depth, complete = self.paths.depths(shape.any_depth, cuts, self.task.interval, self.every_depth)
        depth = depth[(depth != depths(shape.replicas)).any(axis=1)]
        each = self.keys(self.paths.bounds(shape.with_depths(depth), cuts[None, :]))
        bounds = np.broadcast_to(each, len(depth))
        found = []
        for place in np.flatnonzero(bounds * (1.0 if self.task.small else WORTH) < self.bar):
            other = self.shape(shape.replicas, tuple(depth[place].tolist()), shape.placement)
            bound = float(bounds[place])
            found.append(Entry(bound * other.worth, bound, other, cuts, False))
        return found, complete

    # From a start

    def begin(self, start: PlanResult) -> None:
        """Simulate a plan by sums, with its own policies and the best ones for its partition, on regular placements."""
        cuts = np.cumsum((0, *start.partition))
        own, profile, memory = start.to_plan().stage_policies(), self.task.profile, self.task.memory
        placed = self.by_bound(start.replicas, start.depth or None, cuts, REGULAR)
        self.started.append((placed[0][1], cuts))
        for number, (key, shape) in enumerate(placed):
            if key >= self.bar or (number and self.effort <= 0):
                break
            pieces = zip(shape.slices(cuts.tolist()), own, strict=True)
            chosen = [policy_choice(profile, piece, list(policies), memory) for piece, policies in pieces]
            fits = all(choice.memory.total <= memory for choice in chosen)
            if fits and self.bound(shape, cuts, chosen) < self.bar:
                self.simulate(shape, cuts, tuple(chosen))
            # When the effort is spent, its own policies have to do.
            if self.effort > 0 or self.best is None:
                self.settle(shape, cuts)
            if self.best is not None and self.best.shape is shape:
                self.started[-1] = shape, cuts

    def by_bound(
        self, replicas: tuple[int, ...], depth: tuple[int, ...] | None, cuts: Cuts, most: int | None = None
    ) -> list[tuple[float, PlanShape]]:
        """The first so many placements and their bounds, the least first."""
        found = [self.shape(replicas, depth, one) for one in self.placements(replicas)[0][:most]]
        keyed = [(float(self.keys(self.paths.bounds(one.facts, cuts[None, :]))[0]), one) for one in found]
        return sorted(((key * one.worth, one) for key, one in keyed), key=lambda pair: pair[0])

    def other_placements(self) -> None:
        """Simulate the best plan with other ranks, in the order of their bounds."""
        assert self.best is not None
        shape, cuts = self.best.shape, np.array(self.best.cuts)
        others = self.by_bound(shape.replicas, shape.depth, cuts)
        self.effort += effort_of(self.task) if len(others) > 1 else 0
        for key, other in others:
            if key >= self.bar or self.effort <= 0:
                break
            self.simulate(other, cuts, self.best.choices)

    def climb(self) -> float:
        """Improve the best plan step by step, then look further away, and improve what was found there."""
        if self.best is not None:
            self.other_placements()
        self.refine()
        near, more = self.best, MORE * effort_of(self.task)
        self.effort = max(0.0, self.effort) + more
        self.look_at_few_stages(self.effort - more)
        self.effort += more
        while self.best is not None and self.task.small and self.improve(elsewhere(np.array(self.best.cuts))):
            pass
        if self.best is not near:
            self.refine()
        facts = self.shape((1,) * min(self.blocks, self.task.ranks)).any_depth
        return self.paths.of_any_partition(facts, self.task.ranks)

    def refine(self) -> None:
        """Improve the best plan cut by cut, then by its depth; the others by their depth only."""
        while self.best is not None and self.improve(neighbours(np.array(self.best.cuts))):
            pass
        if self.best is not None and self.task.kind.any_depth:
            plain = self.shape(self.best.shape.replicas, None, self.best.shape.placement)
            for start in ((plain, np.array(self.best.cuts)), *self.started):
                self.deepen(*start)
        self.step_depths()

    def improve(self, cuts: Cuts) -> bool:
        """Simulate the best plan with other cuts, in the order of their bounds, until one of them is better."""
        assert self.best is not None
        shape = self.best.shape
        if not len(cuts):
            return False
        bounds = self.keys(self.paths.bounds(shape.facts, cuts)) * shape.worth
        for place in np.argsort(bounds):
            if bounds[place] >= self.bar or self.effort <= 0:
                break
            if self.settle(shape, cuts[place]):
                return True
        return False

    def deepen(self, shape: PlanShape, cuts: Cuts) -> None:
        """Simulate other depths, in the order of their bounds."""
        if self.effort <= 0:
            return
        for entry in sorted(self.depths(shape, cuts)[0], key=lambda entry: entry.key):
            if entry.key >= self.bar or self.effort <= 0:
                break
            self.settle(entry.shape, cuts)

    def step_depths(self) -> None:
        """Change the best plan's depth by one on one stage after the other, as long as that helps."""
        improved = self.task.kind.any_depth and self.task.small
        while improved and self.best is not None and self.effort > 0:
            shape, cuts = self.best.shape, np.array(self.best.cuts)
            improved = any(
                self.effort > 0 and self.settle(self.shape(shape.replicas, depth, shape.placement), cuts)
                for depth in self.near_depths(shape)
            )

    def near_depths(self, shape: PlanShape) -> Iterator[tuple[int, ...]]:
        own = shape.depth or tuple(depths(shape.replicas))
        for stage in range(len(own)):
            for by in (1, -1):
                depth = (*own[:stage], own[stage] + by, *own[stage + 1 :])
                most = shape.interval  # more would make updates rarer
                far = most is not None and depth[stage] * shape.replicas[stage] > most
                joint = not self.task.kind.synchronous
                if depth[stage] >= 0 and not far and too_shallow(shape.replicas, depth, joint=joint) is None:
                    yield depth
