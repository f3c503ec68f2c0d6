"""Bounds on where stages can begin under a limit: sums alone, without a search, tell most of what cannot be.

    block   0 ........... latest(n)           with n ranks left, no plan has come further than this
                 earliest(n) .......... last  and none that begins earlier covers the rest with n ranks

A floor is what a slice costs at least: a sum over its blocks, so that more blocks never cost less. From the latest
block that ranks can have come to, the next stage comes furthest (a stage without blocks is let pass); where the two
bounds cross there is no plan. A bisection finds the least limit under which they do not: a search begins there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vpipe.plan.loads import Loads

Floats = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]

ROUNDING = 1e-9
CLOSE = 1e-4
"""How close the bisection comes to the least limit."""


class Moves(NamedTuple):
    """What a stage may be, by the ranks from it on: replicas, loads, and ranks left behind it."""

    replicas: Floats
    loads: Numbers
    left: Numbers


class Floor(NamedTuple):
    """Slices cost at least before[stop] - before[start] + fixed, and may cost `most`; by load and block."""

    before: Floats
    fixed: Floats
    """A column."""
    most: float = np.inf


class Floors(NamedTuple):
    """Those of what is limited, and others that hold in any case."""

    limited: Sequence[Floor]
    always: Sequence[Floor] = ()

    def under(self, limit: float) -> list[Floor]:
        return [*(floor._replace(most=limit) for floor in self.limited), *self.always]


class StageBounds(NamedTuple):
    """By the ranks that are left: the first blocks that a stage may have there."""

    earliest: Numbers
    latest: Numbers

    @property
    def covers(self) -> bool:
        """Whether there may be a plan."""
        return bool(self.earliest[-1] <= 0 and self.latest[0] >= self.earliest[0])


def all_moves(loads: Loads) -> list[Moves | None]:
    """By the ranks that are left; None where no stage can begin."""
    found: list[list[int]] = [[] for _ in range(loads.ranks + 1)]
    for behind, replicas in loads.index:
        found[behind].append(replicas)
    moves: list[Moves | None] = []
    for behind, choices in enumerate(found):
        choices.sort()
        rows = np.array([loads.index[behind, replicas] for replicas in choices], dtype=int)
        column = np.array(choices, dtype=float)[:, None]
        moves.append(Moves(column, rows, behind - np.array(choices, dtype=int)) if choices else None)
    return moves


def stage_bounds(moves: Sequence[Moves | None], floors: Sequence[Floor], blocks: int) -> StageBounds:
    """Nowhere: earliest lies behind all blocks, and latest before them."""
    earliest, latest = np.full(len(moves), blocks + 1), np.full(len(moves), -1)
    earliest[0], latest[-1] = blocks, 0
    slack = [floor.most + ROUNDING * (floor.most + floor.before[:, -1:]) for floor in floors]
    for behind in range(len(moves) - 1, 0, -1):
        move, start = moves[behind], latest[behind]
        if move is None or start < 0:
            continue
        stop = np.full(len(move.loads), blocks)
        for floor, most in zip(floors, slack, strict=True):
            rows = move.loads
            allowed = floor.before[rows, start, None] + most[rows] - floor.fixed[rows]
            stop = np.minimum(stop, (floor.before[rows] <= allowed).sum(axis=1) - 1)
        # Before `start`: a stage from there costs too much even without blocks, but one from before it may end there.
        latest[move.left] = np.maximum(latest[move.left], stop)
    for behind in range(1, len(moves)):
        move = moves[behind]
        if move is None:
            continue
        stop = np.minimum(earliest[move.left], blocks)
        first = np.zeros(len(move.loads), dtype=int)
        for floor, most in zip(floors, slack, strict=True):
            rows = move.loads
            needed = floor.before[rows, stop][:, None] + floor.fixed[rows] - most[rows]
            first = np.maximum(first, (floor.before[rows] < needed).sum(axis=1))
        possible = (first <= stop) & (earliest[move.left] <= blocks)
        earliest[behind] = np.where(possible, first, blocks + 1).min()
    return StageBounds(earliest, latest)


def furthest(floors: Sequence[Floor]) -> Numbers:
    """By first block: the furthest stop of a slice, with any load."""
    stops: Numbers | None = None
    for floor in floors:
        most = floor.most + ROUNDING * (floor.most + floor.before[:, -1:])
        allowed = floor.before + most - floor.fixed
        rows = zip(floor.before, allowed, strict=True)
        found = np.array([np.searchsorted(before, row, side="right") - 1 for before, row in rows])
        stops = found if stops is None else np.minimum(stops, found)
    assert stops is not None
    return np.asarray(stops.max(axis=0))


def least_limit(moves: Sequence[Moves | None], floors: Floors, blocks: int, most: float = np.inf) -> float:
    """Below it there is no plan; endless where there is none up to `most` either."""
    if not stage_bounds(moves, floors.under(most), blocks).covers:
        return np.inf
    low = 0.0
    high = max(float((floor.before[:, -1:] + floor.fixed).max()) for floor in floors.limited)
    high = min(high, most)
    while high - low > CLOSE * high:
        middle = (low + high) / 2
        if stage_bounds(moves, floors.under(middle), blocks).covers:
            high = middle
        else:
            low = middle
    return low
