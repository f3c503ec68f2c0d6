"""The trials of a search by simulation: what was simulated, the best of it, and how much effort is left."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import inf, prod
from typing import NamedTuple

import numpy as np

from vpipe.plan.chunks import PositionHolding
from vpipe.plan.frontier import FEW, PolicyChoice, policy_choices
from vpipe.plan.model import Load, Slice
from vpipe.plan.paths import Bounds, Cuts, Paths
from vpipe.plan.placements import placements
from vpipe.plan.result import PlanResult, assemble, simulated_seconds
from vpipe.plan.shape import PlanShape
from vpipe.plan.sums import Floats
from vpipe.plan.task import Task
from vpipe.schedule.program import Placement

EFFORT = 200_000
"""Actions that may be simulated; each simulation counts as `EACH` more."""
EACH = 600
NOISE = 0.95
"""What an asynchronous simulation may be below the time of an endless run."""
ROUNDING = 1 - 1e-9
COMBINED = 24
"""Policies of all stages that are tried in every combination."""


class Found(NamedTuple):
    seconds: float
    shape: PlanShape
    cuts: tuple[int, ...]
    choices: tuple[PolicyChoice, ...]

    @property
    def value(self) -> float:
        return self.seconds * self.shape.worth


def effort_of(task: Task) -> int:
    return EFFORT if task.small else EFFORT // task.searches


class Trials:
    """Plans with their stages in line, one on each rank, tried one by one."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.paths = Paths(task.profile)
        self.known: dict[tuple[int, int, Load], list[PolicyChoice]] = {}
        self.tried: dict[tuple[object, ...], float] = {}
        self.made: dict[tuple[object, ...], PlanShape] = {}
        """By replicas, depth and placement."""
        self.effort: float = effort_of(task)
        self.limit = inf
        """Above it a plan is of no use."""
        self.best: Found | None = None
        self.doubted = inf
        """The least bound of a partition of which not all policies, placements or depths were looked at."""
        self.placed: dict[tuple[int, ...], tuple[list[Placement], bool]] = {}

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

    @staticmethod
    def keys(bounds: Bounds) -> Floats:
        return np.maximum(bounds.least, NOISE * bounds.expected)

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

    def settle(self, shape: PlanShape, cuts: Cuts) -> bool:
        """Simulate a partition with the best policies; whether it is better than all before."""
        choices = self.choices(shape.slices(cuts.tolist()))
        if choices is None:
            return False
        quickest = [own[0] for own in choices]
        if any(choice.longer for choice in quickest) and self.bound(shape, cuts, quickest) >= self.bar:
            return False
        before = self.best
        for chosen in self.combined(choices):
            self.simulate(shape, cuts, tuple(chosen))
        if any(choice.copied for choice in quickest) and self.best is not before:
            self.exchange(shape, cuts, choices)
        many = any(piece.stop - piece.start > FEW for piece in shape.slices(cuts.tolist()))
        if prod(map(len, choices)) > COMBINED or (many and any(choice.longer for choice in quickest)):
            bound = self.keys(self.paths.bounds(shape.facts, cuts[None, :]))
            self.doubted = min(self.doubted, float(bound[0]))
        return self.best is not before

    def bound(self, shape: PlanShape, cuts: Cuts, choices: Sequence[PolicyChoice]) -> float:
        """Of a partition with these policies, times what its depth must be worth."""
        longer = np.array([[choice.longer for choice in choices]])
        return float(self.keys(self.paths.bounds(shape.facts, cuts[None, :], longer))[0]) * shape.worth

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
        self.effort -= (EACH + 2 * run * schedule.num_stages) * self.task.walks
        found = Found(inf, shape, tuple(cuts.tolist()), choices)
        seconds = simulated_seconds(self.task, self.result(found), self.task.simulated)
        self.tried[key] = seconds
        # Of large problems a plan above the limit may be improved until it is below.
        if seconds * shape.worth < (self.bar if self.task.small else self.value * ROUNDING):
            self.best = found._replace(seconds=seconds)

    def result(self, found: Found) -> PlanResult:
        shape = found.shape
        holdings = [
            PositionHolding((piece,), [choice.policies], choice.memory, 0.0)
            for piece, choice in zip(shape.slices(found.cuts), found.choices, strict=True)
        ]
        made = assemble(self.task, None, shape.interval, holdings, shape.placement)
        return replace(made, depth=shape.depth or (), seconds=found.seconds)
