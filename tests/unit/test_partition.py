"""Partitions that even out ranks: several stages a rank, several ranks a stage; compared with brute force."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.drawing import draws
from vpipe.graph.partition import _busiest, partition_for_ranks

V = ((0,), (1,), (1,), (0,))


def every_partition(blocks: int, stages: int) -> list[tuple[int, ...]]:
    cuts = combinations(range(1, blocks), stages - 1)
    return [tuple(b - a for a, b in zip((0, *cut), (*cut, blocks), strict=True)) for cut in cuts]


@pytest.mark.parametrize(
    ("weights", "placement", "expected"),
    [
        ([3, 3, 3, 1], ((0,), (1,)), (2, 2)),
        ([1] * 9, ((0, 1), (2,)), (6, 3)),  # two replicas do twice the work
        ([4, 1, 1, 1, 1, 4], V, (1, 2, 2, 1)),
    ],
)
def test_small_cases(weights: list[int], placement: tuple, expected: tuple[int, ...]) -> None:
    found = partition_for_ranks(weights, placement)
    assert _busiest(weights, found, placement) == _busiest(weights, expected, placement)


@draws(60)
@given(
    weights=st.lists(st.integers(1, 20), min_size=6, max_size=11),
    placement=st.sampled_from([V, ((0, 1), (2,)), ((0,), (1, 2)), ((0,), (1,), (0,), (1,))]),
)
def test_close_to_the_best_there_is(weights: list[int], placement: tuple) -> None:
    found = partition_for_ranks(weights, placement)
    assert sum(found) == len(weights)
    best = min(_busiest(weights, p, placement)[0] for p in every_partition(len(weights), len(placement)))
    assert _busiest(weights, found, placement)[0] <= best + max(weights) / 2
