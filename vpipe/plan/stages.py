"""The search for stages: cuts and replicas for the cheapest most expensive stage.

Dynamic programming over (ranks, blocks) that are left: what a stage costs depends on the ranks from it to the end
and on its own replicas, not on how the others are cut. Under a limit, a pass from the front with lower bounds only
says which states any plan below the limit can go through; a pass from the back then settles those, asking for an
exact cost only where its bound is the best on offer. The limit starts at a bound for all plans (`stage_bounds.py`,
which also tells states that need not be looked at) and grows until there is a plan below it. A last pass evens out the
other stages: the least sum of squares under the best maximum.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from vpipe.plan.loads import Loads
from vpipe.plan.model import Slice
from vpipe.plan.slices import SliceCosts
from vpipe.plan.stage_bounds import Moves, all_moves, furthest, least_limit, stage_bounds
from vpipe.plan.sums import Floats, Span

ROUNDING = 1 + 1e-9
LIMITS = (1.002, 1.01, 1.03, 1.06, 1.1, 1.17, 1.25, 1.5, 2.0, 4.0)
"""Tried one after the other, times the bound; a pass is the quicker the lower its limit."""


class StageCut(NamedTuple):
    start: int
    stop: int
    load: int
    cost: float


def search(costs: SliceCosts, blocks: int, even: bool = True, limit: float = np.inf) -> list[StageCut] | None:
    """The stages whose most expensive one is cheapest, the others even; None if that is above `limit`."""
    moves = all_moves(costs.loads)
    bound, steps, tried = least_limit(moves, costs.floors, blocks, limit), list(LIMITS), 0.0
    while np.isfinite(bound) and tried < limit:
        tried = min(bound * steps.pop(0) if steps else np.inf, limit)
        reached = forward(costs, moves, blocks, tried)
        leads = np.isfinite(reached[0, blocks]) and reached[0, blocks] <= tried
        if leads and (found := backward(costs, moves, blocks, reached, tried)):
            largest = max(stage.cost for stage in found)
            return backward(costs, moves, blocks, reached, largest * ROUNDING, even=True) if even else found
    return None


def stage_costs(costs: SliceCosts, bounds: Floats, move: Moves, behind: int, span: Span) -> Floats:
    """By move and stop: the stage's own cost, or that of its cuts."""
    cuts = np.maximum(costs.cuts[behind, span.start], costs.cuts[move.left, span.ends])
    return np.asarray(np.maximum(bounds[move.loads], cuts / move.replicas))


class _States:
    """The states that matter under a limit."""

    def __init__(
        self, costs: SliceCosts, moves: list[Moves | None], blocks: int, reached: Floats, limit: float
    ) -> None:
        self.costs, self.moves, self.reached, self.limit = costs, moves, reached, limit
        floors = costs.floors.under(limit)
        self.band, self.stops = stage_bounds(moves, floors, blocks), furthest(floors)

    def at(self, start: int) -> Iterator[tuple[int, Moves, Span, Floats]]:
        """Those at a block: ranks left, moves, the slices that they may have, and bounds of all of these."""
        come, last = self.reached[:, start], int(self.stops[start])
        matter = np.isfinite(come) & (come <= self.limit)
        matter &= (self.band.earliest <= start) & (start <= self.band.latest)
        wanted = [(int(behind), move) for behind in np.flatnonzero(matter) if (move := self.moves[behind])]
        if wanted and last > start:
            span = Span(start, last, np.unique(np.concatenate([move.loads for _, move in wanted])))
            bounds = self.costs.bounds(span)
            yield from ((behind, move, span, bounds) for behind, move in wanted)


def forward(costs: SliceCosts, moves: list[Moves | None], blocks: int, limit: float) -> Floats:
    """The least bound of the most expensive stage before each (ranks left, first block)."""
    reached = np.full((len(moves), blocks + 1), np.inf)
    reached[-1, 0] = 0.0
    states = _States(costs, moves, blocks, reached, limit)
    for start in range(blocks) if states.band.covers else ():
        for behind, move, span, bounds in states.at(start):
            offered = np.maximum(stage_costs(costs, bounds, move, behind, span), reached[behind, start])
            reached[move.left, span.ends] = np.minimum(reached[move.left, span.ends], offered)
    return reached


def backward(
    costs: SliceCosts,
    moves: list[Moves | None],
    blocks: int,
    reached: Floats,
    limit: float,
    even: bool = False,
) -> list[StageCut] | None:
    """The best stages of which none costs more than `limit`; by the largest, or by the sum of squares."""
    best = np.full((len(moves), blocks + 1), np.inf)
    best[0, blocks] = 0.0
    taken: dict[tuple[int, int], StageCut] = {}
    states = _States(costs, moves, blocks, reached, limit)
    for start in range(blocks - 1, -1, -1):
        for behind, move, span, bounds in states.at(start):
            own = stage_costs(costs, bounds, move, behind, span)
            rest = best[move.left, span.ends]
            totals = _totals(own, rest, limit, even)
            while np.isfinite(least := totals.min()):
                row, column = np.unravel_index(int(totals.argmin()), totals.shape)
                load, stop = int(move.loads[row]), start + 1 + int(column)
                exact = costs.exact(start, stop, load)
                bounds[load, column] = exact
                cut = max(costs.cuts[behind, start], costs.cuts[move.left[row], stop])
                cost = max(exact, cut / float(move.replicas[row, 0]))
                total = _totals(np.float64(cost), rest[row, column], limit, even)
                if total <= least:
                    best[behind, start] = total
                    taken[behind, start] = StageCut(start, stop, load, float(cost))
                    break
                totals[row, column] = total
    return _path(costs, taken, blocks) if np.isfinite(best[-1, 0]) else None


def _totals(own: Floats | np.float64, rest: Floats, limit: float, even: bool) -> Floats:
    total = own * own + rest if even else np.maximum(own, rest)
    return np.where((own <= limit) & np.isfinite(total), total, np.inf)


def _path(costs: SliceCosts, taken: dict[tuple[int, int], StageCut], blocks: int) -> list[StageCut]:
    behind, start = costs.loads.ranks, 0
    stages: list[StageCut] = []
    while start < blocks:
        stage = taken[behind, start]
        stages.append(stage)
        behind -= costs.loads.loads[stage.load].replicas
        start = stage.stop
    return stages


def placed(stages: list[StageCut], loads: Loads) -> list[Slice]:
    """The stages as slices, ranks numbered stage by stage."""
    slices: list[Slice] = []
    first = 0
    for stage in stages:
        load = loads.loads[stage.load]
        following = first + load.replicas
        ranks = tuple(range(first, following))
        before = first - 1 if first else None
        after = following if following < loads.ranks else None
        slices.append(Slice(stage.start, stage.stop, load, ranks, before, after))
        first = following
    return slices
