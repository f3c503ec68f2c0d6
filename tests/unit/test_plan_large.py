"""Plans of many blocks on many ranks: what is found fits, and only few slices are looked at closely.

How long it takes is measured by `benchmarks/speed.py`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from vpipe.cost import BlockCost, DeviceCost, LinkCost, Profile
from vpipe.errors import VPipeError
from vpipe.plan import PlanResult, plan
from vpipe.plan.slices import MemoryCosts, SliceCosts, TimeCosts

GIB = 2**30
REFUSED = r"nothing fits .* what would fit: a memory of .*, or \d+ ranks"


def all_different(count: int) -> Profile:
    random = Random(1)
    blocks = tuple(
        BlockCost(
            "block", 0.006 * size, 0.006 * size, 0.005 * size, 0.0, round(4e7 * size), 8_000_000, round(2.4e7 * size),
            deferred_bytes=round(1.4e7 * size),
        )
        for size in (random.uniform(0.8, 1.2) for _ in range(count))
    )  # fmt: skip
    return Profile(blocks, DeviceCost(8 * GIB, 1.2e10, 1.2e10, 2e-5), LinkCost(1e10, 1e-5), 8)


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> Counter[type]:
    """How many slices were solved exactly, by the kind of their cost."""
    counted: Counter[type] = Counter()

    def counting(kind: type[SliceCosts]) -> None:
        plain = kind.solve

        def solve(self: Any, start: int, stop: int, load: int) -> tuple[float, list[str]]:
            counted[kind] += 1
            return plain(self, start, stop, load)

        monkeypatch.setattr(kind, "solve", solve)

    counting(TimeCosts)
    counting(MemoryCosts)
    return counted


def check(result: PlanResult, memory: int) -> None:
    assert set(result.policies) != {"keep"}
    assert all(position.memory.total <= memory for position in result.positions)


def test_400_blocks_on_64_ranks(solved: Counter[type]) -> None:
    """Of 80,200 slices, each on 64 places, and memory is short: bounds leave less than a thousand to look at."""
    check(plan(all_different(400), 64, schedule="vpipe"), 8 * GIB)
    assert 64 <= solved[TimeCosts] < 1000


def test_the_fastest_schedule_of_100_blocks_on_16_ranks(solved: Counter[type]) -> None:
    """`auto` looks at `zb-v` and `interleaved`, which take longest, as well."""
    check(plan(all_different(100), 16, GIB, "auto"), GIB)
    assert 16 <= solved[TimeCosts] < 1000


def test_a_refusal_of_100_blocks_on_16_ranks(solved: Counter[type]) -> None:
    with pytest.raises(VPipeError, match=REFUSED):
        plan(all_different(100), 16, 600 * 2**20, "auto")
    assert not solved[TimeCosts]
    assert 16 <= solved[MemoryCosts] < 2000


@pytest.mark.long
def test_the_fastest_schedule_of_400_blocks_on_64_ranks(solved: Counter[type]) -> None:
    check(plan(all_different(400), 64, schedule="auto"), 8 * GIB)
    assert 64 <= solved[TimeCosts] < 2000


@pytest.mark.parametrize(
    ("blocks", "ranks", "memory", "schedule"),
    [(60, 4, 5 * GIB // 2, "vpipe"), pytest.param(400, 64, 8 * GIB, "1f1b", marks=pytest.mark.long)],
)
def test_where_swapping_takes_time(blocks: int, ranks: int, memory: int, schedule: str) -> None:
    """A third of a forward, a little different for each block: no choice is for free then."""
    random, profile = Random(2), all_different(blocks)
    costs = tuple(
        replace(block, swapping=block.forward / 3 * random.uniform(0.9, 1.1)) for block in profile.blocks
    )
    result = plan(replace(profile, blocks=costs), ranks, memory, schedule)
    check(result, memory)
    assert "swap" in result.policies


@pytest.mark.long
def test_a_refusal_of_400_blocks_on_64_ranks(solved: Counter[type]) -> None:
    with pytest.raises(VPipeError, match=REFUSED):
        plan(all_different(400), 64, GIB // 2, "auto")
    assert 64 <= solved[MemoryCosts] < 3000
