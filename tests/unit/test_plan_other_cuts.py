"""Partitions that differ in a single cut."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from vpipe.plan.other_cuts import elsewhere, neighbours

CUTS = [(0, 5), (0, 1, 5), (0, 2, 4, 7), (0, 1, 2, 3), (0, 3, 4, 9, 10)]


@pytest.mark.parametrize("cuts", CUTS)
def test_every_partition_with_one_other_cut(cuts: tuple[int, ...]) -> None:
    inner = set(cuts[1:-1])
    every = combinations(range(1, cuts[-1]), len(inner))
    wanted = {(0, *other, cuts[-1]) for other in every if len(inner - set(other)) == 1}
    found = [tuple(row) for row in elsewhere(np.array(cuts)).tolist()]
    assert set(found) == wanted
    assert len(found) == len(wanted)


@pytest.mark.parametrize("cuts", CUTS)
def test_neighbours_are_one_block_away(cuts: tuple[int, ...]) -> None:
    found = {tuple(row) for row in neighbours(np.array(cuts)).tolist()}
    everywhere = {tuple(row) for row in elsewhere(np.array(cuts)).tolist()}
    near = {row for row in everywhere if sum(abs(a - b) for a, b in zip(row, cuts, strict=True)) == 1}
    assert found == near
