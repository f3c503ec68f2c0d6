"""The search by simulation: the plan that takes least time, or the best that was found and how far off it may be.

What a step takes depends on links and on who waits for whom, which sums over stages do not know. So each partition with
its replicas and its placement on hosts has a lower bound (`paths.py`), and they are simulated in the order of these
bounds, until no bound is below the best time. Where there are too many of them, or `EFFORT` is spent, the plans that
the sums found are improved cut by cut, and `gap` says how far the result may be from the best.

Other depths than the schedule's own cost memory and, in asynchronous runs, make weights older: a plan has them only if
that makes it faster by `WORTH`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import product
from math import comb, inf, prod
from typing import NamedTuple

import numpy as np

from vpipe.plan.chunks import PositionHolding
from vpipe.plan.frontier import FEW, PolicyChoice, policy_choice, policy_choices
from vpipe.plan.model import Load, Slice
from vpipe.plan.paths import Bounds, Cuts, Paths, PipelineFacts, all_cuts, compositions
from vpipe.plan.placements import placements
from vpipe.plan.result import PlanResult, assemble, simulated_seconds
from vpipe.plan.shape import WORTH, PlanShape
from vpipe.plan.sums import Floats
from vpipe.plan.task import Task
from vpipe.schedule.program import Placement
from vpipe.schedule.staircase import depths

MOST = 20_000
"""Partitions, with replicas, that are looked at one by one."""
EFFORT = 200_000
"""Actions that may be simulated; each simulation counts as `EACH` more."""
EACH = 600
PLACED = 4
"""Times the effort where ranks are on several hosts and every partition is looked at."""
REGULAR = 4
"""Placements on which a plan by sums is simulated."""
NOISE = 0.95
"""What an asynchronous simulation may be below the time of an endless run."""
ROUNDING = 1 - 1e-9
COMBINED = 24
"""Policies of all stages that are tried in every combination."""


class Entry(NamedTuple):
    """A partition in the order of the search; a shape without ranks stands for all placements."""

    key: float
    least: float
    shape: PlanShape
    cuts: Cuts
    open_depth: bool
    """Whether it stands for all depths but the schedule's own."""


class Found(NamedTuple):
    seconds: float
    shape: PlanShape
    cuts: tuple[int, ...]
    choices: tuple[PolicyChoice, ...]

    @property
    def value(self) -> float:
        return self.seconds * self.shape.worth


class SimulatedSearch:
    """The search for stages in line: one on each rank."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.blocks = len(task.profile.blocks)
        self.paths = Paths(task.profile)
        self.known: dict[tuple[int, int, Load], list[PolicyChoice]] = {}
        self.tried: dict[tuple[object, ...], float] = {}
        self.made: dict[tuple[object, ...], PlanShape] = {}
        """By replicas, depth and placement."""
        self.effort = EFFORT
        self.best: Found | None = None
        self.doubted = inf
        """The least bound of a partition of which not all policies, or placements, were looked at."""
        self.started: list[tuple[PlanShape, Cuts]] = []
        """Where a climb begins."""
        self.placed: dict[tuple[int, ...], tuple[list[Placement], bool]] = {}

    def run(self, starts: Iterable[PlanResult], limit: float) -> PlanResult | None:
        """`starts`: plans by sums; `limit`: a plan that takes longer is of no use."""
        # What another depth must be faster by is no part of the limit.
        self.limit = inf if self.task.simulated < self.task.update else limit * WORTH / ROUNDING**3 + 1e-12
        for start in starts:
            self.begin(start)
        if self.count() <= MOST:
            self.effort *= 1 if self.task.profile.hosts is None else PLACED
            proven = self.in_order(self.entries())
        else:
            proven = self.climb()
        if self.best is None:
            return None
        gap = self.best.seconds / proven - 1 if proven else inf
        return replace(self.result(self.best), gap=None if gap <= 1e-6 else gap)

    def shapes(self) -> Iterator[PlanShape]:
        task = self.task
        if task.kind.table is not None:
            yield self.shape(tuple(map(len, task.kind.table.placement)))
            return
        for stages in task.counts:
            for replicas in compositions(task.ranks, stages):
                if task.allows(replicas):
                    yield self.shape(replicas)

    def shape(
        self,
        replicas: tuple[int, ...],
        depth: tuple[int, ...] | None = None,
        placement: Placement | None = None,
    ) -> PlanShape:
        """One object for each: what it computes is kept. Where there is one placement only, it has that."""
        if placement is None and len(self.placements(replicas)[0]) == 1:
            placement = self.placements(replicas)[0][0]
        made = PlanShape(self.task, replicas, depth, placement)
        return self.made.setdefault((replicas, depth, placement), made)

    def placements(self, replicas: tuple[int, ...]) -> tuple[list[Placement], bool]:
        """Those to try, and whether these are all; a table has its own."""
        if replicas not in self.placed:
            table = self.task.kind.table
            found = placements(self.task.profile, replicas) if table is None else ([table.placement], True)
            self.placed[replicas] = found
        return self.placed[replicas]

    def count(self) -> int:
        """Partitions with all replicas, at most."""
        return sum(comb(self.blocks - 1, n - 1) * comb(self.task.ranks - 1, n - 1) for n in self.task.counts)

    @property
    def complete(self) -> bool:
        """Whether it looks at all partitions and all policies, and needs no start."""
        return self.blocks <= FEW and self.count() <= MOST

    # In the order of the bounds

    def entries(self) -> list[Entry]:
        found: list[Entry] = []
        for shape in self.shapes():
            cuts = all_cuts(self.blocks, len(shape.replicas))
            found += self.of_shape(shape, cuts, shape.facts, False)
            if self.task.kind.any_depth and len(shape.replicas) > 1:
                found += self.of_shape(shape, cuts, shape.any_depth, True)
        return found

    def of_shape(self, shape: PlanShape, cuts: Cuts, facts: PipelineFacts, open_depth: bool) -> list[Entry]:
        bounds = self.paths.bounds(facts, cuts)
        keys = self.keys(bounds) * (WORTH if open_depth else shape.worth)
        rows = zip(keys.tolist(), bounds.least.tolist(), cuts, strict=True)
        return [Entry(key, least, shape, row, open_depth) for key, least, row in rows]

    @staticmethod
    def keys(bounds: Bounds) -> Floats:
        return np.maximum(bounds.least, NOISE * bounds.expected)

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
                self.settle(entry.shape, entry.cuts, entry.least)
                continue
            for more in self.expand(entry):
                number += 1
                heappush(heap, (more.key, number, more))
        if self.effort > 0:
            return min(self.doubted, inf if self.best is None else self.best.seconds)
        left = min((entry.least for _, _, entry in heap), default=inf)
        return min(left, self.doubted, inf if self.best is None else self.best.seconds)

    def expand(self, entry: Entry) -> Iterator[Entry]:
        """The placements or, of a shape that has one, the depths that an entry stands for."""
        shape, cuts = entry.shape, entry.cuts[None, :]
        if shape.placement is not None:
            for other in self.other_depths(shape, entry.cuts):
                yield from self.of_shape(other, cuts, other.facts, False)
            return
        found, complete = self.placements(shape.replicas)
        if not complete:
            self.doubted = min(self.doubted, entry.least)
        for placement in found:
            placed = self.shape(shape.replicas, shape.depth, placement)
            yield from self.of_shape(
                placed, cuts, placed.any_depth if entry.open_depth else placed.facts, entry.open_depth
            )

    def other_depths(self, shape: PlanShape, cuts: Cuts) -> Iterator[PlanShape]:
        """Deeper ones, and where memory is short less deep ones; none if the usual one does not fit.

        So whether a schedule fits at all, and what is said if not, depends on its own depth only.
        """
        choices = self.choices(shape.slices(cuts.tolist()))
        if choices is None:
            return
        usual, short = depths(shape.replicas), any(own[0].longer or own[0].copied for own in choices)
        for depth in self.paths.depths(shape.any_depth, cuts):
            deeper = any(ahead > own for ahead, own in zip(depth, usual, strict=True))
            if list(depth) != usual and (deeper or short):
                yield self.shape(shape.replicas, depth, shape.placement)

    # One partition

    @property
    def value(self) -> float:
        return inf if self.best is None else self.best.value

    @property
    def bar(self) -> float:
        """What a plan must be below to be of use."""
        return min(self.limit, self.value) * ROUNDING

    def choices(self, slices: Iterable[Slice]) -> list[list[PolicyChoice]] | None:
        """For each stage the policies to choose from; None: a stage does not fit."""
        found = []
        for piece in slices:
            key = (piece.start, piece.stop, piece.load)
            if key not in self.known:
                self.known[key] = policy_choices(self.task.profile, piece, self.task.memory)
                self.effort -= 20 * (len(self.known[key]) != 1) * (piece.stop - piece.start)
            if not self.known[key]:
                return None
            found.append(self.known[key])
        return found

    def settle(self, shape: PlanShape, cuts: Cuts, least: float = 0.0) -> bool:
        """Simulate a partition with the best policies; whether it is better than all before."""
        choices = self.choices(shape.slices(cuts.tolist()))
        if choices is None:
            return False
        quickest = [own[0] for own in choices]
        if any(choice.longer for choice in quickest):
            longer = np.array([[choice.longer for choice in quickest]])
            bounds = self.paths.bounds(shape.facts, cuts[None, :], longer)
            if float(self.keys(bounds)[0]) * shape.worth >= self.bar:
                return False
        before = self.best
        for chosen in self.combined(choices):
            self.simulate(shape, cuts, tuple(chosen))
        if any(choice.copied for choice in quickest) and self.best is not before:
            self.exchange(shape, cuts, choices)
        many = any(piece.stop - piece.start > FEW for piece in shape.slices(cuts.tolist()))
        if prod(map(len, choices)) > COMBINED or (many and any(choice.longer for choice in quickest)):
            self.doubted = min(self.doubted, least)
        return self.best is not before

    def begin(self, start: PlanResult) -> None:
        """Simulate a plan by sums, with its own policies and the best ones for its partition, on regular placements."""
        cuts = np.cumsum((0, *start.partition))
        own, profile, memory = start.to_plan().stage_policies(), self.task.profile, self.task.memory
        placed = self.by_bound(start.replicas, None, cuts, REGULAR)
        self.started.append((placed[0][1], cuts))
        for number, (key, shape) in enumerate(placed):
            if key >= self.bar or (number and self.effort <= 0):
                break
            pieces = zip(shape.slices(cuts.tolist()), own, strict=True)
            chosen = [policy_choice(profile, piece, list(policies), memory) for piece, policies in pieces]
            if all(choice.memory.total <= memory for choice in chosen):
                self.simulate(shape, cuts, tuple(chosen))
            # On hosts there are more starts: when the effort is spent, their own policies have to do.
            if self.effort > 0 or self.best is None or len(placed) == 1:
                self.settle(shape, cuts)
            if self.best is not None and self.best.shape is shape:
                self.started[-1] = shape, cuts

    def combined(self, choices: list[list[PolicyChoice]]) -> Iterator[Sequence[PolicyChoice]]:
        """All combinations of few, else the quickest of each stage and those that copy least."""
        if prod(map(len, choices)) <= COMBINED:
            yield from product(*choices)
        else:
            yield [own[0] for own in choices]
            yield [own[-1] for own in choices]

    def exchange(self, shape: PlanShape, cuts: Cuts, choices: list[list[PolicyChoice]]) -> None:
        """Other policies for one stage after the other, as long as that helps."""
        improved = True
        while improved and self.effort > 0:
            before = self.best
            for stage, own in enumerate(choices):
                for choice in own:
                    if self.effort <= 0:
                        return
                    assert self.best is not None
                    chosen = list(self.best.choices)
                    chosen[stage] = choice
                    self.simulate(shape, cuts, tuple(chosen))
            improved = self.best is not before

    def simulate(self, shape: PlanShape, cuts: Cuts, choices: tuple[PolicyChoice, ...]) -> None:
        key = (
            shape.replicas,
            shape.depth,
            shape.placement,
            cuts.tobytes(),
            tuple((one.longer, one.copied) for one in choices),
        )
        if key in self.tried:
            return
        schedule = shape.schedule
        run = schedule.minibatches or 6 * schedule.filling + 4 * schedule.update_interval
        shared = self.task.profile.device.shared_by > 1 < self.task.profile.device.crowding
        self.effort -= (EACH + 2 * run * schedule.num_stages) * (3 if shared else 1)
        found = Found(inf, shape, tuple(cuts.tolist()), choices)
        seconds = simulated_seconds(self.task, self.result(found), self.task.simulated)
        self.tried[key] = seconds
        if seconds * shape.worth < self.bar:
            self.best = found._replace(seconds=seconds)

    def result(self, found: Found) -> PlanResult:
        shape = found.shape
        holdings = [
            PositionHolding((piece,), [choice.policies], choice.memory, 0.0)
            for piece, choice in zip(shape.slices(found.cuts), found.choices, strict=True)
        ]
        made = assemble(self.task, None, shape.interval, holdings, shape.placement)
        return replace(made, depth=shape.depth or (), seconds=found.seconds)

    # From a start

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
        self.effort += EFFORT if len(others) > 1 else 0
        for key, other in others:
            if key >= self.bar or self.effort <= 0:
                break
            self.simulate(other, cuts, self.best.choices)

    def climb(self) -> float:
        """Improve the best plan by its placement, cut by cut, then by its depth; the others by their depth only."""
        if self.best is not None:
            self.other_placements()
        improved = True
        while improved and self.best is not None and self.effort > 0:
            improved = False
            shape = self.best.shape
            cuts = neighbours(np.array(self.best.cuts))
            if not len(cuts):
                break
            bounds = self.keys(self.paths.bounds(shape.facts, cuts)) * shape.worth
            for place in np.argsort(bounds):
                if bounds[place] >= self.bar or self.effort <= 0:
                    break
                if improved := self.settle(shape, cuts[place]):
                    break
        if self.best is not None and self.task.kind.any_depth:
            plain = self.shape(self.best.shape.replicas, None, self.best.shape.placement)
            for start in ((plain, np.array(self.best.cuts)), *self.started):
                self.deepen(*start)
        facts = self.shape((1,) * min(self.blocks, self.task.ranks)).any_depth
        return self.paths.of_any_partition(facts, self.task.ranks)

    def deepen(self, shape: PlanShape, cuts: Cuts) -> None:
        """Simulate other depths, in the order of their bounds."""
        if self.effort <= 0:
            return
        keyed = [
            (float(self.keys(self.paths.bounds(other.facts, cuts[None, :]))[0]) * other.worth, other)
            for other in self.other_depths(shape, cuts)
        ]
        for key, other in sorted(keyed, key=lambda pair: pair[0]):
            if key >= self.bar or self.effort <= 0:
                break
            self.settle(other, cuts)


def neighbours(cuts: Cuts) -> Cuts:
    """Each cut one block to the left and to the right."""
    moved = []
    for place in range(1, len(cuts) - 1):
        for by in (-1, 1):
            if cuts[place - 1] < cuts[place] + by < cuts[place + 1]:
                other = cuts.copy()
                other[place] += by
                moved.append(other)
    return np.array(moved)
