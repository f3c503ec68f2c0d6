"""How long planning takes at its largest: `benchmarks/speed.py` measures every schedule, this keeps the bound."""

from random import Random
from time import thread_time

import pytest

from vpipe.cost import BlockCost, DeviceCost, LinkCost, Profile
from vpipe.plan import plan

GIB = 2**30
BOUND = 10.0
NOISE = 2.5
"""What neighbours on the same core may cost."""


@pytest.mark.parametrize("schedule", ["vpipe", "zb-v"])
def test_400_blocks_on_64_ranks(schedule: str) -> None:
    """All blocks differ, and memory is short."""
    random = Random(1)
    blocks = tuple(
        BlockCost(
            "block", 0.006 * size, 0.006 * size, 0.005 * size, 0.0, round(4e7 * size), 8_000_000, round(2.4e7 * size),
            deferred_bytes=round(1.4e7 * size),
        )
        for size in (random.uniform(0.8, 1.2) for _ in range(400))
    )  # fmt: skip
    profile = Profile(blocks, DeviceCost(8 * GIB, 1.2e10, 1.2e10, 2e-5), LinkCost(1e10, 1e-5), 8)
    begin = thread_time()
    result = plan(profile, 64, schedule=schedule)
    assert thread_time() - begin < BOUND * NOISE
    assert set(result.policies) != {"keep"}
    assert all(position.memory.total <= 8 * GIB for position in result.positions)
