"""The latest blocks that ranks can reach under a limit, against every cut of small models and a closed formula."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.drawing import draws
from vpipe.plan.loads import Loads
from vpipe.plan.model import Load
from vpipe.plan.stage_bounds import Floor, Floors, all_moves, furthest, least_limit, stage_bounds


def one_rank_each(ranks: int) -> Loads:
    """Every stage on one rank, with a load of its own."""
    loads = tuple(Load(1, number + 1, 1, 0, False, 1.0) for number in range(ranks))
    return Loads(ranks, loads, {(behind, 1): behind - 1 for behind in range(1, ranks + 1)})


def floor_of(costs: list[list[int]], fixed: list[int], most: float = np.inf) -> Floor:
    """`costs` of each block by load."""
    before = np.array([np.cumsum([0, *row]) for row in costs], dtype=float)
    return Floor(before, np.array(fixed, dtype=float)[:, None], most)


@pytest.mark.parametrize(("blocks", "ranks"), [(12, 4), (13, 4), (7, 7), (400, 64)])
def test_equal_blocks_are_dealt_out(blocks: int, ranks: int) -> None:
    floor = floor_of([[3] * blocks] * ranks, [1] * ranks)
    moves, least = all_moves(one_rank_each(ranks)), 1 + 3 * -(-blocks // ranks)
    assert least_limit(moves, Floors([floor]), blocks) == pytest.approx(least, rel=2e-4)
    assert least_limit(moves, Floors([floor]), blocks, least) == pytest.approx(least, rel=2e-4)
    assert least_limit(moves, Floors([floor]), blocks, least - 0.01) == np.inf


class Problem(NamedTuple):
    """Costs and bytes of each block by load, and costs of each load."""

    costs: list[list[int]]
    bytes: list[list[int]]
    fixed: list[int]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    ranks = draw(st.integers(1, 4))
    blocks, small = ranks + draw(st.integers(0, 3)), st.integers(0, 5)
    costs, sizes = ([[draw(small) for _ in range(blocks)] for _ in range(ranks)] for _ in range(2))
    return Problem(costs, sizes, draw(st.lists(small, min_size=ranks, max_size=ranks)))


@draws(200)
@given(problems())
def test_no_plan_is_below_the_least_limit_nor_outside_the_bounds(problem: Problem) -> None:
    ranks, blocks = len(problem.costs), len(problem.costs[0])
    floor = floor_of(problem.costs, problem.fixed)
    bytes_ = floor_of(problem.bytes, [0] * ranks, 9)
    moves, floors = all_moves(one_rank_each(ranks)), Floors([floor], [bytes_])

    def stage(what: Floor, start: int, stop: int, row: int) -> float:
        return float(what.before[row, stop] - what.before[row, start] + what.fixed[row, 0])

    plans: list[tuple[float, tuple[int, ...]]] = []
    for inner in combinations(range(1, blocks), ranks - 1):
        ends = (0, *inner, blocks)
        stages = [(start, stop, ranks - 1 - place) for place, (start, stop) in enumerate(pairwise(ends))]
        if all(stage(bytes_, *one) <= 9 for one in stages):
            plans.append((max(stage(floor, *one) for one in stages), ends))
    bound = least_limit(moves, floors, blocks)
    for most, ends in plans:
        assert bound <= most
        band = stage_bounds(moves, floors.under(most), blocks)
        assert band.covers
        for place, start in enumerate(ends):
            assert band.earliest[ranks - place] <= start <= band.latest[ranks - place]
        stops = furthest(floors.under(most))
        assert all(stop <= stops[start] <= blocks for start, stop in pairwise(ends))


def test_nothing_reaches_the_end() -> None:
    """A block that no rank can hold."""
    floor = floor_of([[1, 5, 1]] * 2, [0, 0], most=4)
    moves = all_moves(one_rank_each(2))
    assert not stage_bounds(moves, [floor], 3).covers
    assert least_limit(moves, Floors([floor._replace(most=np.inf)], [floor]), 3) == np.inf
