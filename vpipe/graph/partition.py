"""Partitions: how many consecutive blocks each stage holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from vpipe.errors import PartitionError

Best = dict[int, tuple[int, int, tuple[int, ...]]]
"""Number of blocks, from the first: heaviest stage, sum of squares and partition of the best way to place them."""


def check_partition(partition: Sequence[int], blocks: int) -> None:
    """Raise PartitionError unless every stage holds a block and all blocks are held."""
    counts = list(partition)
    if not counts or any(
        isinstance(count, bool) or not isinstance(count, int) or count < 1 for count in counts
    ):
        raise PartitionError(f"partition {counts}: every stage holds a whole number of blocks, at least one")
    if len(counts) > blocks:
        raise PartitionError(
            f"partition {counts} has {len(counts)} stages, but the model has only {blocks} blocks"
        )
    if sum(counts) != blocks:
        difference = blocks - sum(counts)
        repaired = [*counts[:-1], counts[-1] + difference]
        hint = f"; for example {repaired}" if repaired[-1] > 0 else ""
        raise PartitionError(
            f"partition {counts} sums to {sum(counts)}, but the model has {blocks} blocks{hint}"
        )


def balanced_partition(weights: Sequence[int], stages: int, uncut: str = "") -> tuple[int, ...]:
    """The partition whose heaviest stage is as light as possible, and the others then as even as possible.

    `uncut` ends the error for too few blocks: why there may be so few.
    """
    blocks = len(weights)
    if stages < 1:
        raise PartitionError(f"{stages} stages: give at least one")
    if stages > blocks:
        raise PartitionError(
            f"{stages} stages, but the model has only {blocks} blocks; use at most {blocks} stages (chunks of a rank"
            " count too). Blocks lie between the cheapest cuts and have enough to compute (`vpipe blocks` lists them):"
            f" more layers give more of them, and every child of an nn.Sequential is one{uncut}"
        )
    before = [0, *accumulate(weights)]
    best: Best = {0: (0, 0, ())}
    for stage in range(1, stages + 1):
        following: Best = {}
        for end in range(stage, blocks - (stages - stage) + 1):
            for start in (start for start in reversed(best) if start < end):
                weight = before[end] - before[start]
                if end in following and weight > following[end][0]:
                    break  # longer stages only get heavier
                heaviest, squares, counts = best[start]
                found = (max(heaviest, weight), squares + weight * weight, (*counts, end - start))
                if end not in following or found[:2] < following[end][:2]:
                    following[end] = found
        best = following
    return best[blocks][2]


def partition_for_ranks(
    weights: Sequence[int], placement: Sequence[Sequence[int]], uncut: str = ""
) -> tuple[int, ...]:
    """A partition that evens out ranks rather than stages.

    `placement` gives each stage's ranks: replicas share a stage's work, and a rank may hold several stages.
    From the partition that evens out stages, runs of neighbouring cuts are moved while the busiest rank gains.
    """
    best = list(balanced_partition(weights, len(placement), uncut))
    if len({rank for ranks in placement for rank in ranks}) == len(placement):
        return tuple(best)
    cost = _busiest(weights, best, placement)
    improved = True
    while improved:
        improved = False
        for counts in _neighbours(best):
            reached = _busiest(weights, counts, placement)
            if reached < cost:
                best, cost, improved = counts, reached, True
    return tuple(best)


def _neighbours(counts: list[int]) -> Iterator[list[int]]:
    """Partitions in which the cuts first..last lie one or two blocks earlier or later."""
    for first in range(len(counts) - 1):
        for last in range(first, len(counts) - 1):
            for step in (-2, -1, 1, 2):
                moved = list(counts)
                moved[first] += step
                moved[last + 1] -= step
                if min(moved) >= 1:
                    yield moved


def _busiest(
    weights: Sequence[int], counts: Sequence[int], placement: Sequence[Sequence[int]]
) -> tuple[float, float]:
    """The work of the busiest rank, then of the heaviest stage."""
    ends = list(accumulate(counts))
    stages = [sum(weights[end - count : end]) for count, end in zip(counts, ends, strict=True)]
    ranks: dict[int, float] = {}
    for work, holders in zip(stages, placement, strict=True):
        for rank in holders:
            ranks[rank] = ranks.get(rank, 0.0) + work / len(holders)
    return max(ranks.values()), max(stages)
