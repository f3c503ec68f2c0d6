"""How long planning takes at its largest: `benchmarks/speed.py` measures every schedule, this keeps the bound."""

from dataclasses import replace
from random import Random
from time import thread_time

import pytest

from vpipe.cost import BlockCost, DeviceCost, LinkCost, Profile
from vpipe.errors import VPipeError
from vpipe.plan import plan

GIB = 2**30
BOUND = 10.0
NOISE = 2.5
"""What neighbours on the same core may cost."""


@pytest.fixture(scope="module")
def profile() -> Profile:
    """All blocks differ."""
    random = Random(1)
    blocks = tuple(
        BlockCost(
            "block", 0.006 * size, 0.006 * size, 0.005 * size, 0.0, round(4e7 * size), 8_000_000, round(2.4e7 * size),
            deferred_bytes=round(1.4e7 * size),
        )
        for size in (random.uniform(0.8, 1.2) for _ in range(400))
    )  # fmt: skip
    return Profile(blocks, DeviceCost(8 * GIB, 1.2e10, 1.2e10, 2e-5), LinkCost(1e10, 1e-5), 8)


@pytest.mark.parametrize("schedule", ["vpipe", "auto"])
def test_400_blocks_on_64_ranks(profile: Profile, schedule: str) -> None:
    """Memory is short; `auto` looks at `zb-v` and `interleaved`, which take longest, as well."""
    begin = thread_time()
    result = plan(profile, 64, schedule=schedule)
    assert thread_time() - begin < BOUND * NOISE
    assert set(result.policies) != {"keep"}
    assert all(position.memory.total <= 8 * GIB for position in result.positions)


def test_400_blocks_on_64_ranks_where_swapping_takes_time(profile: Profile) -> None:
    """A third of a forward, a little different for each block: no choice is for free then."""
    random = Random(2)
    blocks = tuple(
        replace(block, swapping=block.forward / 3 * random.uniform(0.9, 1.1)) for block in profile.blocks
    )
    begin = thread_time()
    result = plan(replace(profile, blocks=blocks), 64, schedule="1f1b")
    assert thread_time() - begin < BOUND * NOISE
    assert "swap" in result.policies


def test_a_refusal_of_400_blocks_on_64_ranks(profile: Profile) -> None:
    begin = thread_time()
    with pytest.raises(VPipeError, match=r"nothing fits .* what would fit: a memory of .*, or \d+ ranks"):
        plan(profile, 64, GIB, "auto")
    assert thread_time() - begin < BOUND * NOISE
