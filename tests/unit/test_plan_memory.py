"""The planner's memory of a stage against the simulator, which follows every event."""

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from tests.drawing import draws
from tests.unit.test_plan_optimal import block
from vpipe.cost import BlockCost, DeviceCost, LinkCost, Plan, Profile, Tie
from vpipe.plan.loads import equal_loads, loads_by_place
from vpipe.plan.model import stage_memory
from vpipe.plan.stages import StageCut, placed
from vpipe.schedule import kind_of
from vpipe.simulate import simulate

SCHEDULES = st.sampled_from(["pipedream", "vpipe", "2bw", "1f1b", "gpipe"])
BLOCKS = st.lists(block, min_size=4, max_size=8)
POLICIES = st.lists(st.sampled_from(["keep", "recompute"]), min_size=8, max_size=8)


def both(
    profile: Profile, policies: list[str], name: str, replicas: tuple[int, ...], minibatches: int
) -> tuple[list[int], list[int]]:
    """The bytes of each stage: planned, and simulated (on its first rank, which has no fewer minibatches)."""
    ranks, blocks = sum(replicas), len(profile.blocks)
    parts = len(replicas)
    partition = tuple(blocks // parts + (part < blocks % parts) for part in range(parts))
    interval = ranks if name == "2bw" else None
    used = Plan(partition, tuple(policies[:blocks]), name, replicas, update_interval=interval)
    if len(set(replicas)) == 1:
        loads = equal_loads(kind_of(name), ranks, replicas[0], minibatches)
    else:
        loads = loads_by_place(kind_of(name), ranks, minibatches)
    stages, behind = [], ranks
    for end, count, own in zip(accumulate(partition), partition, replicas, strict=True):
        stages.append(StageCut(end - count, end, loads.index[behind, own], 0.0))
        behind -= own
    slices = placed(stages, loads)
    planned = [
        stage_memory(profile, [piece], [chosen]).total
        for piece, chosen in zip(slices, used.stage_policies(), strict=True)
    ]
    simulated = simulate(profile, used, None, minibatches)
    return planned, [simulated.ranks[piece.ranks[0]].memory.total for piece in slices]


@draws(60)
@given(
    BLOCKS,
    POLICIES,
    SCHEDULES,
    st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (4, 1)]),
    st.booleans(),
)
def test_equals_the_simulated_peak(
    blocks: list[BlockCost], policies: list[str], name: str, layout: tuple[int, int], tied: bool
) -> None:
    stages, replicas = layout
    shared = min(blocks[0].parameter_bytes, blocks[-1].parameter_bytes)
    # Of replicas and 2BW the planner does not know how far the first stage is behind, and takes the most.
    tied = tied and replicas == 1 and name != "2bw" and shared > 0
    ties = (Tie(shared, (0, len(blocks) - 1)),) if tied else ()
    profile = Profile(tuple(blocks), DeviceCost(1, 1.0, 1.0, workspace=7), LinkCost(1.0, 0.0), 1, tied=ties)
    planned, simulated = both(profile, policies, name, (replicas,) * stages, 12 * replicas)
    assert planned == simulated


@draws(50)
@given(BLOCKS, POLICIES, SCHEDULES, st.sampled_from([(1, 2), (2, 1), (1, 3), (2, 1, 1), (1, 2, 1)]))
def test_uneven_replicas_need_no_more_than_is_planned(
    blocks: list[BlockCost], policies: list[str], name: str, replicas: tuple[int, ...]
) -> None:
    profile = Profile(tuple(blocks), DeviceCost(1, 1.0, 1.0), LinkCost(1.0, 0.0), 1)
    planned, simulated = both(profile, policies, name, replicas, 48)
    assert all(need >= found for need, found in zip(planned, simulated, strict=True))


@draws(40)
@given(
    st.lists(block, min_size=6, max_size=6),
    st.lists(st.sampled_from(["keep", "recompute", "swap"]), min_size=6, max_size=6),
    st.sampled_from(["pipedream", "2bw", "1f1b", "gpipe"]),
    st.sampled_from([2, 3]),
    st.sampled_from([0.5, 3.0, 50.0]),
)
def test_swapping_needs_no_more_than_is_planned(
    blocks: list[BlockCost], policies: list[str], name: str, lying: int, host: float
) -> None:
    """Swapped are blocks of ranks with more minibatches in flight than lie there: elsewhere it saves nothing."""
    device = DeviceCost(1, host, 2 * host, swapped_in=lying)
    profile = Profile(tuple(blocks), device, LinkCost(10.0, 0.0), 1)
    policies[6 - lying :] = ["keep"] * lying
    planned, simulated = both(profile, policies, name, (1,) * 6, 24)
    assert all(need >= found for need, found in zip(planned, simulated, strict=True))
