"""A memory policy of one's own: registered, it is planned and simulated, and no other code knows it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.drawing import draws
from vpipe.cost import POLICIES, BlockCost, DeviceCost, LinkCost, MemoryPolicy, Profile
from vpipe.cost.policies import register
from vpipe.plan import plan
from vpipe.plan.choice import choose, least_memory
from vpipe.plan.model import Load, Slice, stage_memory, stage_time
from vpipe.simulate import simulate
from vpipe.stage.policies import RUNS


class Half(MemoryPolicy):
    """Half of the bytes stay, the others take half a forward."""

    name = "half"

    def held(self, block: BlockCost, entered: int) -> int:
        return block.kept_bytes // 2

    def rebuilt(self, block: BlockCost, entered: int) -> int:
        return block.kept_bytes - block.kept_bytes // 2

    def seconds(self, block: BlockCost) -> float:
        return block.forward / 2


@pytest.fixture(autouse=True, scope="module")
def half() -> Iterator[None]:
    register(Half())
    yield
    del POLICIES["half"]


def profile_of(*blocks: BlockCost) -> Profile:
    return Profile(blocks, DeviceCost(10**9, 3.0, 3.0), LinkCost(1e9, 0.0), 1)


def test_it_is_planned_and_simulated() -> None:
    """Recomputing saves nothing (inputs are as large as what is kept) and the host link is slow."""
    first, block = (BlockCost("b", 1.0, 1.0, 1.0, 0.0, kept, 100, 1) for kept in (0, 100))
    profile = profile_of(first, *[block] * 7)
    keeping = plan(profile, 2, schedule="1f1b")
    assert keeping.policies == ("keep",) * 8
    less = max(position.memory.total for position in keeping.positions) - 100
    result = plan(profile, 2, less, "1f1b")
    assert set(result.policies) == {"keep", "half"}
    simulated = simulate(profile, result.to_plan())
    for position in result.positions:
        assert simulated.ranks[position.ranks[0]].memory.total == position.memory.total <= less
    computed = sum(rank.compute for rank in simulated.ranks) * simulated.step_time
    assert computed == pytest.approx(simulated.minibatches * (8 * 3 + result.policies.count("half") / 2))


blocks = st.builds(
    lambda forward, kept, boundary, swapping, working: BlockCost(
        "b", forward / 4, 0.5, 0.5, 0.0, kept, boundary, 1, swapping=swapping / 4, working_bytes=working
    ),
    st.integers(1, 12), st.integers(1, 40), st.integers(0, 40), st.integers(0, 12), st.integers(0, 5),
)  # fmt: skip


@draws(60)
@given(st.lists(blocks, min_size=1, max_size=4), st.integers(1, 4), st.data())
def test_the_choice_equals_brute_force(found: list[BlockCost], in_flight: int, data: st.DataObject) -> None:
    profile = profile_of(*found)
    piece = Slice(0, len(found), Load(1, in_flight, 1, 0, False, 1.0), (0,), None, None)
    every = []
    for policies in product(("keep", "recompute", "swap", "half"), repeat=len(found)):
        time = stage_time(profile, [piece], [policies])
        every.append((stage_memory(profile, [piece], [policies]).total, max(time.compute, time.host)))
    assert least_memory(profile, [piece]) == min(needed for needed, _ in every)
    memory = data.draw(st.sampled_from([needed for needed, _ in every]))
    chosen = choose(profile, [piece], memory)
    best = min((seconds for needed, seconds in every if needed <= memory), default=inf)
    assert chosen is not None
    assert chosen[0] == pytest.approx(best)


@draws(15)
@given(st.lists(blocks, min_size=2, max_size=4), st.integers(0, 100))
def test_whole_plans_equal_brute_force(found: list[BlockCost], more: int) -> None:
    """Two ranks, one stage each; asynchronous, so that the slowest rank tells the time."""
    profile = profile_of(*found)
    memory = 60 + more
    loads = [Load(1, 2, 2, 0, False, 1.0, 2, True), Load(1, 1, 1, 0, False, 1.0, 2, True)]
    best = inf
    for cut in range(1, len(found)):
        slices = [
            Slice(0, cut, loads[0], (0,), None, 1),
            Slice(cut, len(found), loads[1], (1,), 0, None),
        ]
        times = [
            min(
                (
                    stage_time(profile, [piece], [policies]).seconds
                    for policies in product(POLICIES, repeat=piece.stop - piece.start)
                    if stage_memory(profile, [piece], [policies]).total <= memory
                ),
                default=inf,
            )
            for piece in slices
        ]
        best = min(best, max(times))
    if best < inf:
        result = plan(profile, 2, memory, "pipedream")
        assert max(position.seconds for position in result.positions) <= best * (1 + 1e-9)


def test_stages_can_run_every_policy() -> None:
    assert RUNS.keys() == POLICIES.keys() - {"half"}
