"""The planner's memory of a rank with several slices against the simulator, which follows every event."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.drawing import draws
from tests.unit.test_plan_optimal import block
from vpipe.cost import BlockCost, DeviceCost, LinkCost, Plan, Profile
from vpipe.plan import plan
from vpipe.plan.loads import schedule_loads
from vpipe.plan.model import Slice, stage_memory
from vpipe.plan.moments import Moment, at_moments, peak_memory, schedule_moments
from vpipe.schedule import build
from vpipe.simulate import simulate


def test_the_picture() -> None:
    first = schedule_moments(build("zb-v", 4, 16))[0]
    assert Moment(None, ((7, 0), (1, 0))) in first
    assert max(sum(map(sum, moment.counts)) for moment in first) == 8  # 1F1B's first rank, in half stages


@draws(50)
@given(
    st.lists(block, min_size=8, max_size=12),
    st.lists(st.sampled_from(["keep", "recompute", "swap"]), min_size=12, max_size=12),
    st.sampled_from(["interleaved", "zb-v"]),
    st.sampled_from([1, 2, 4]),
    st.integers(2, 11),
    st.sampled_from([2, 3]),
)
def test_equals_the_simulated_peak(
    blocks: list[BlockCost], policies: list[str], name: str, positions: int, minibatches: int, lying: int
) -> None:
    """Where some is swapped it depends on the clock, and is no more."""
    if name == "interleaved":
        minibatches -= minibatches % positions
    if not minibatches:
        return
    device = DeviceCost(1, 1.0, 1.0, workspace=7, swapped_in=lying)
    profile = Profile(tuple(blocks), device, LinkCost(1.0, 0.0), 1)
    stages = 2 * positions
    partition = tuple(len(blocks) // stages + (s < len(blocks) % stages) for s in range(stages))
    chosen = Plan(partition, tuple(policies[: len(blocks)]), name)
    simulated = simulate(profile, chosen, name, minibatches)
    schedule = build(name, positions, minibatches)
    loads = schedule_loads(schedule)
    ends = list(accumulate(partition))
    for position, moments in enumerate(schedule_moments(schedule)):
        held = schedule.stages_of(position)
        slices = [
            Slice(
                ends[s] - partition[s],
                ends[s],
                loads[s],
                (position,),
                None if s == 0 or schedule.placement[s - 1] == (position,) else 0,
                None if s == stages - 1 or schedule.placement[s + 1] == (position,) else 0,
            )
            for s in held
        ]
        own = [chosen.stage_policies()[s] for s in held]
        exact = peak_memory(profile, slices, own, moments)[0].total
        found = simulated.ranks[position].memory.total
        assert exact >= found if any("swap" in chosen for chosen in own) else exact == found
        assert exact <= stage_memory(profile, at_moments(slices, moments), own).total


@pytest.mark.parametrize("name", ["interleaved", "zb-v"])
def test_a_plan_uses_the_memory_that_there_is(name: str) -> None:
    """Under a cap of what keeping everything really needs, nothing is recomputed."""
    blocks = tuple(
        BlockCost(f"{n}", 1.0, 1.0, 1.0, 0.0, 100, 4, 10_000, deferred_bytes=60) for n in range(16)
    )
    profile = Profile(blocks, DeviceCost(10**9, 1.0, 1.0), LinkCost(1e4, 0.0), 1)
    keeping = plan(profile, 4, 300_000, name, minibatches=8)
    assert max(keeping.replicas) == 1  # more blocks than a quarter do not fit
    assert set(keeping.policies) == {"keep"}
    simulated = simulate(profile, keeping.to_plan())
    peak = max(rank.memory.total for rank in simulated.ranks)
    assert peak == max(position.memory.total for position in keeping.positions)
    tight = plan(profile, 4, peak, name, minibatches=8)
    assert set(tight.policies) == {"keep"}
    assert tight.seconds == pytest.approx(keeping.seconds)
