"""Simulated time of ranks that share a GPU or the cores of a host, against hand-made cases and an exact simulation."""

from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.drawing import draws
from vpipe.cost import BlockCost, DeviceCost, Hosts, LinkCost, Plan, Profile, shared_ranks, taking_turns
from vpipe.plan import plan as planner
from vpipe.schedule import Action, Event, Op, build
from vpipe.simulate import simulate
from vpipe.simulate.contention import contention_of

COMPUTING = {Op.F, Op.B, Op.I, Op.W}


def block(
    forward: float = 1.0, input_gradient: float = 1.0, weight_gradient: float = 1.0, update: float = 0.0
) -> BlockCost:
    sizes = {"kept_bytes": 10, "boundary_bytes": 4, "parameter_bytes": 100}
    return BlockCost("block", forward, input_gradient, weight_gradient, update, **sizes)


def profile(*blocks: BlockCost, **device: Any) -> Profile:
    return Profile(blocks, DeviceCost(10**9, 1e9, 1e9, **device), LinkCost(inf), batch_size=2)


def exact(costs: Profile, name: str, minibatches: int, cores: float) -> float:
    """The time of an update, one stage a rank, if at every moment each of n ranks that compute has cores / n of a core.

    From one end of an action to the next, with free links.
    """
    stages = len(costs.blocks)
    programs = [
        [a for a in build(name, stages, minibatches).program(rank) if a.op in COMPUTING]
        for rank in range(stages)
    ]
    done: set[Action] = set()
    left: dict[Action, float] = {}
    now, began, ended = 0.0, [inf] * stages, [0.0] * stages

    def ready(action: Action) -> bool:
        before = {
            Op.F: [(action.stage - 1, Op.F)],
            Op.W: [],
        }.get(action.op, [(action.stage + 1, action.op)])
        return all(Action(stage, op, action.minibatch) in done for stage, op in before if 0 <= stage < stages)

    def work(action: Action) -> float:
        own = costs.blocks[action.stage]
        return {Op.F: own.forward, Op.I: own.input_gradient, Op.W: own.weight_gradient}.get(
            action.op, own.backward
        )

    while any(programs):
        for rank, program in enumerate(programs):
            if program and program[0] not in left and ready(program[0]):
                left[program[0]] = work(program[0])
                began[rank] = min(began[rank], now)
        pace = min(1.0, cores / len(left))
        step = min(left.values()) / pace
        now += step
        left = {action: rest - step * pace for action, rest in left.items()}
        for action in [action for action, rest in left.items() if rest < 1e-9]:
            done.add(action)
            del left[action]
            programs[action.stage].pop(0)
            ended[action.stage] = now
    return max(end - begin for begin, end in zip(began, ended, strict=True))


times = st.floats(0.2, 3)


@draws(60)
@given(
    st.lists(st.builds(block, times, times, times), min_size=2, max_size=5),
    st.sampled_from(["gpipe", "1f1b", "zb-h1"]),
    st.integers(1, 12),
    st.sampled_from([1.0, 1.5, 2.0, 3.0]),
)
def test_ranks_without_cores_of_their_own_take_turns(
    blocks: list[BlockCost], name: str, minibatches: int, cores: float
) -> None:
    costs = profile(*blocks, at_once=cores)
    plan = Plan((1,) * len(blocks), ("keep",) * len(blocks))
    found = simulate(costs, plan, name, minibatches)
    assert found.step_time == pytest.approx(exact(costs, name, minibatches, cores), rel=0.03)
    if cores >= len(blocks):
        assert found == simulate(profile(*blocks), plan, name, minibatches)


@pytest.mark.parametrize(
    ("ranks", "cores", "expected"), [(4, 2, 6.0), (4, 3, 4.0), (4, 4, 3.0), (6, 1, 18.0)]
)
def test_an_endless_run_is_as_fast_as_its_cores(ranks: int, cores: int, expected: float) -> None:
    """Each of the equal ranks takes 3 s for a minibatch, and nobody waits."""
    costs = profile(*[block()] * ranks, at_once=cores)
    result = simulate(costs, Plan((1,) * ranks, ("keep",) * ranks), "pipedream", 64)
    assert result.step_time == pytest.approx(expected, rel=0.01)
    assert [rank.compute for rank in result.ranks] == pytest.approx([1.0] * ranks, rel=0.05)


def test_each_host_has_cores_of_its_own() -> None:
    costs = profile(*[block()] * 4, at_once=2)
    plan = Plan((1,) * 4, ("keep",) * 4)
    one, two, three = (
        simulate(replace(costs, hosts=Hosts(ranks, LinkCost(1e9))), plan, "pipedream", 64).step_time
        for ranks in (((0, 1, 2, 3),), ((0, 2), (1, 3)), ((0, 1, 2), (3,)))
    )
    assert (one, two, three) == pytest.approx((6.0, 3.0, 4.5), rel=0.01)


def test_a_plan_knows_that_more_ranks_than_cores_gain_nothing() -> None:
    costs = profile(*[block()] * 6, at_once=2)
    two, six = (planner(costs, ranks, schedule="1f1b", minibatches=12) for ranks in (2, 6))
    assert six.seconds == pytest.approx(two.seconds, rel=0.02)
    assert six.seconds == pytest.approx(simulate(costs, six.to_plan()).step_time / 12)
    alone = planner(profile(*[block()] * 6), 6, schedule="1f1b", minibatches=12)
    assert alone.seconds < two.seconds / 2
    assert taking_turns(costs, 2) is None
    assert taking_turns(costs, 6) == "6 ranks of a host take turns on cores for 2"
    all_ranks = planner(costs, 6, schedule="1f1b", minibatches=12, all_ranks=True)
    assert all_ranks.turns == "6 ranks of a host take turns on cores for 2"


def test_ranks_of_one_device_are_quicker_while_others_wait() -> None:
    """Alone an action takes two thirds of what it takes while the other rank computes: the first and the last do.

    rank 0    F0 F1         B0 B1
    rank 1       F0 F1 B0 B1
    """
    full = profile(*[block()] * 2)
    shared = replace(full, device=replace(full.device, shared_by=2, crowding=1.5))
    plan = Plan((1, 1), ("keep",) * 2)
    alone, together = (simulate(costs, plan, "gpipe", 2, timeline=True) for costs in (full, shared))
    assert alone.timeline is not None
    assert together.timeline is not None
    first = {event.action: event for event in together.timeline.events if event.rank == 0}
    lasted = {action: event.end - event.start for action, event in first.items()}
    assert lasted[Action.parse("0F0")] == pytest.approx(2 / 3)
    assert lasted[Action.parse("0B1")] == pytest.approx(2 * 2 / 3)
    assert lasted[Action.parse("0F1")] == pytest.approx(1.0, rel=0.1)
    assert 2 / 3 < together.step_time / alone.step_time < 1.0
    computed = sum(lasted[action] for action in lasted if action.op is not Op.STEP)
    assert together.ranks[0].compute * together.makespan == pytest.approx(computed)
    # A rank whose neighbours are not in the run is alone.
    one = Plan((2,), ("keep",) * 2)
    quick, slow = (simulate(costs, one, "gpipe", 2).step_time for costs in (shared, full))
    assert quick == pytest.approx(slow / 1.5)


def test_ranks_of_different_devices_do_not_slow_each_other_down() -> None:
    full = profile(*[block()] * 4)
    pairs = replace(full, device=replace(full.device, shared_by=2, crowding=1.5))
    result = simulate(pairs, Plan((1,) * 4, ("keep",) * 4), "pipedream", 64)
    # In the steady part nobody waits: all is as it was measured.
    assert result.samples_per_second == pytest.approx(2 / 3, rel=0.02)
    contention = contention_of(
        [Event(0, Action(0, Op.F, 0), 0.0, 1.0), Event(2, Action(2, Op.F, 0), 0.0, 1.0)],
        4,
        shared_ranks(pairs, 4),
        [{Op.F: 1.0}] * 4,
    )
    assert contention.factors == {Action(0, Op.F, 0): 1 / 1.5, Action(2, Op.F, 0): 1 / 1.5}
    assert contention.means == (1 / 1.5, 1.0, 1 / 1.5, 1.0)
