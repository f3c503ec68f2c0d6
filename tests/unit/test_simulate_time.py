"""Simulated time against closed formulas and cases worked out by hand."""

from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.drawing import draws
from tests.schedules import NAMES
from vpipe.cost import BlockCost, DeviceCost, HostCost, LinkCost, Plan, Profile, for_batch_size
from vpipe.errors import VPipeError
from vpipe.plan import plan as planner
from vpipe.schedule import Op, bubble, build, lower
from vpipe.simulate import Simulation, simulate
from vpipe.simulate.report import simulation_table

FREE = LinkCost(inf, 0.0)


def block(
    forward: float = 1.0, input_gradient: float = 1.0, weight_gradient: float = 1.0, **more: Any
) -> BlockCost:
    sizes = {"update": 0.0, "kept_bytes": 10, "boundary_bytes": 4, "parameter_bytes": 100} | more
    return BlockCost("block", forward, input_gradient, weight_gradient, **sizes)


def profile(*blocks: BlockCost, link: LinkCost = FREE, host: float = inf, **more: Any) -> Profile:
    return Profile(blocks, DeviceCost(10**9, host, host), link, batch_size=2, **more)


def equal(stages: int, schedule: str, minibatches: int, link: LinkCost = FREE) -> Simulation:
    plan = Plan((1,) * stages, ("keep",) * stages)
    return simulate(profile(*[block()] * stages, link=link), plan, schedule, minibatches, timeline=True)


def starts(simulation: Simulation) -> dict[str, float]:
    assert simulation.timeline is not None
    return {str(event.action): event.start for event in simulation.timeline.events}


@pytest.mark.parametrize("p", [1, 2, 4, 7])
@pytest.mark.parametrize("m", [1, 4, 16])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_bubble_of_a_flush(name: str, p: int, m: int) -> None:
    result = equal(p, name, m)
    assert result.bubble == pytest.approx((p - 1) / (m + p - 1))
    assert result.step_time == pytest.approx(3 * (m + p - 1))
    assert result.samples_per_second == pytest.approx(2 * m / (3 * (m + p - 1)))


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 16), (8, 32)])
def test_the_bubble_of_zb_h1(p: int, m: int) -> None:
    assert equal(p, "zb-h1", m).bubble == pytest.approx((p - 1) / (3 * m + p - 1))


@pytest.mark.parametrize(("name", "more"), [("1f1b", 0.75), ("zb-h1", 1.0), ("vpipe", 0.0), ("2bw", 0.0)])
def test_a_split_or_adding_backward_takes_longer(name: str, more: float) -> None:
    """Three of four minibatches of an update add to gradients; here asynchronous ones update after each."""
    costs = profile(block(splitting=0.25, accumulating=1.0), host=1e9)
    result = simulate(costs, Plan((1,), ("keep",)), name, 4)
    assert result.samples_per_second == pytest.approx(2 / (3 + more))
    assert result.ranks[0].compute == pytest.approx(1.0)
    planned = planner(costs, 1, schedule=name, minibatches=4)
    assert planned.samples_per_second == pytest.approx(result.samples_per_second)
    assert for_batch_size(costs, 4).blocks[0].splitting == 0.5


@pytest.mark.parametrize(
    ("name", "policy", "host", "expected"),
    [
        ("1f1b", "keep", HostCost(2.0, 1.0), 3.25),  # 4 minibatches of 3 s and an update of 1 s: the device
        ("1f1b", "keep", HostCost(6.0, 2.0), 6.5),  # the host
        ("vpipe", "keep", HostCost(6.0, 2.0), 8.0),  # it updates after each minibatch
        ("1f1b", "recompute", HostCost(6.0, 2.0, recomputing=1.0), 7.5),
        ("1f1b", "keep", HostCost(6.0, 2.0, splitting=1.0), 6.5),
        ("zb-h1", "keep", HostCost(6.0, 2.0, splitting=1.0), 7.5),
    ],
)
def test_a_rank_is_as_slow_as_its_host(name: str, policy: str, host: HostCost, expected: float) -> None:
    costs = profile(block(update=1.0, host=host), host=1e9)
    result = simulate(costs, Plan((1,), (policy,)), name, 4)
    assert result.samples_per_second == pytest.approx(2 / expected)
    assert result.ranks[0].compute == pytest.approx(1.0)
    planned = planner(costs, 1, schedule=name, minibatches=4)
    assert planned.samples_per_second >= result.samples_per_second * (1 - 1e-9)
    assert (result.ranks[0].pace > 1) == (host.minibatch > 2)
    assert for_batch_size(costs, 4).blocks[0].host == host  # the same kernels, whatever the samples


def test_calls_take_time_of_the_host_for_each_stage() -> None:
    blocks = [block(host=HostCost(2.0))] * 4
    costs = profile(*blocks)
    costs = replace(costs, device=replace(costs.device, host=HostCost(6.0)))
    result = simulate(costs, Plan((2, 2), ("keep",) * 4), "1f1b", 8)
    assert result.step_time == pytest.approx(10 * (8 + 1))  # the device alone: 6 (8 + 1)
    one = simulate(costs, Plan((4,), ("keep",) * 4), "1f1b", 8)
    assert one.step_time == pytest.approx(14 * 8)


@pytest.mark.parametrize("replicas", [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("name", ["1f1b", "vpipe"])
def test_only_a_rank_whose_host_is_slower_takes_longer(name: str, replicas: tuple[int, int]) -> None:
    """As long as a device would that is three times as slow."""
    plan = Plan((1, 1), ("keep",) * 2, replicas=replicas)
    launched = simulate(profile(block(host=HostCost(2.0)), block(host=HostCost(9.0))), plan, name, 64)
    computed = simulate(profile(block(), block(3.0, 3.0, 3.0)), plan, name, 64)
    assert launched.step_time == pytest.approx(computed.step_time)
    assert [rank.compute for rank in launched.ranks] == pytest.approx([r.compute for r in computed.ranks])


def test_a_host_of_which_not_all_is_known_counts_as_fast() -> None:
    unknown = block(), block(host=HostCost(9.0))
    assert simulate(profile(*unknown), Plan((2,), ("keep",) * 2), "1f1b", 4).step_time == pytest.approx(24)


def test_a_host_is_compared_with_a_device_that_others_leave_alone() -> None:
    """Two ranks on a device that is twice as fast for one of them, and one minibatch: they take turns."""
    costs = profile(*[block(host=HostCost(3.0))] * 2)
    costs = replace(costs, device=replace(costs.device, shared_by=2, crowding=2.0))
    plan = Plan((1, 1), ("keep",) * 2)
    alone = simulate(replace(costs, blocks=(block(),) * 2), plan, "1f1b", 1)
    assert alone.step_time == pytest.approx(3.0)  # each of 1.5 s, while the other waits
    assert simulate(costs, plan, "1f1b", 1).step_time == pytest.approx(6.0)


@pytest.mark.parametrize(("recomputing", "again"), [(None, 1.0), (1.5, 1.5), (0.0, 0.0)])
def test_recomputing_takes_its_own_time_or_a_forward(recomputing: float | None, again: float) -> None:
    costs = profile(block(recomputing=recomputing), host=1e9)
    result = simulate(costs, Plan((1,), ("recompute",)), "1f1b", 4)
    assert result.samples_per_second == pytest.approx(2 / (3 + again))
    assert for_batch_size(costs, 4).blocks[0].again == pytest.approx(2 * again)


@pytest.mark.parametrize(("name", "again"), [("1f1b", 0.5), ("zb-h1", 0.75)])
def test_recomputing_may_take_longer_where_backward_is_split(name: str, again: float) -> None:
    costs = profile(block(recomputing=0.5, split_recomputing=0.75), host=1e9)
    result = simulate(costs, Plan((1,), ("recompute",)), name, 4)
    assert result.samples_per_second == pytest.approx(2 / (3 + again))
    planned = planner(costs, 1, schedule=name, minibatches=4)
    assert planned.samples_per_second == pytest.approx(2 / 3)


@pytest.mark.parametrize("name", ["pipedream", "1f1b", "zb-h1"])
def test_swapping_takes_time_beside_its_copies(name: str) -> None:
    """The copies are free here; what the rank does for them lengthens the part of backward that others wait for."""
    costs = profile(*[block(swapping=0.75)] * 3)
    plan = Plan((2, 1), ("swap", "keep", "keep"))
    result = simulate(costs, plan, name, 40, timeline=True)
    assert result.timeline is not None
    lengths = {
        event.action.op: event.end - event.start for event in result.timeline.events if event.rank == 0
    }
    parts = {Op.I: 2.75, Op.W: 2} if name == "zb-h1" else {Op.B: 4.75}
    assert lengths == pytest.approx({Op.F: 2, Op.STEP: 0} | parts)
    assert for_batch_size(costs, 4).blocks[0].swapping == 0.75


@pytest.mark.parametrize("name", NAMES)
def test_the_bubble_is_the_schedules_own_at_unit_costs(name: str) -> None:
    """A rank may begin the next update before others end this one, so the bubble is never larger."""
    result = equal(4, name, 24)
    plain = bubble(build(name, 2 if name in ("interleaved", "zb-v") else 4, 24))
    assert result.bubble <= plain + 1e-9
    if result.synchronous:
        assert result.bubble == pytest.approx(plain, abs=0.03)


@pytest.mark.parametrize("name", ["pipedream", "vpipe", "2bw"])
def test_asynchronous_runs_are_as_fast_as_their_slowest_stage(name: str) -> None:
    blocks = [block(), block(2, 1.5, 1.5, update=0.4), block(0.5), block()]
    result = simulate(profile(*blocks), Plan((1,) * 4, ("keep",) * 4), name, 60)
    assert result.steady
    slowest = 5 + 0.4 / result.update_interval
    assert result.samples_per_second == pytest.approx(2 / slowest)
    assert result.step_time == pytest.approx(slowest * result.update_interval)
    assert [rank.bubble for rank in result.ranks] == pytest.approx(
        [1 - 3 / slowest, 0, 1 - 2.5 / slowest, 1 - 3 / slowest], abs=1e-6
    )


def test_a_run_that_is_too_short_says_so() -> None:
    result = equal(4, "pipedream", 5)
    assert not result.steady
    assert result.samples_per_second == pytest.approx(2 * 5 / result.makespan)


def test_replicas_take_turns() -> None:
    """A stage of twice the work on two ranks keeps up; its ranks wait for each other at updates."""
    blocks = [block(2, 2, 2), block(1, 1, 1)]
    result = simulate(profile(*blocks), Plan((1, 1), ("keep",) * 2, replicas=(2, 1)), "pipedream", 64)
    assert result.samples_per_second == pytest.approx(2 / 3)
    slow = LinkCost(
        100.0, 0.5
    )  # gradients of 100 bytes go in two halves, of 1 s each; activations take 0.54 s
    slowed = simulate(
        profile(*blocks, link=slow), Plan((1, 1), ("keep",) * 2, replicas=(2, 1)), "pipedream", 64
    )
    assert slowed.step_time == pytest.approx(6 + 2)


def test_a_message_takes_latency_and_bandwidth() -> None:
    found = starts(equal(2, "1f1b", 1, LinkCost(bandwidth=8.0, latency=0.25)))
    assert found == {"0F0": 0, "1F0": 1.75, "1B0": 2.75, "0B0": 5.5, "0STEP0": 7.5, "1STEP0": 4.75}


def test_a_link_carries_one_message_at_a_time() -> None:
    """Messages of 2 s behind forwards of 1 s: they queue, while the sender computes on."""
    found = starts(equal(2, "gpipe", 3, LinkCost(bandwidth=2.0, latency=0.0)))
    assert [found[f"0F{m}"] for m in range(3)] == [0, 1, 2]
    assert [found[f"1F{m}"] for m in range(3)] == [3, 5, 7]
    assert found["1B0"] == 8
    assert [found[f"0B{m}"] for m in range(3)] == [12, 14, 16]  # sent at 10, 12, 14, there 2 later


def test_chunks_share_the_links_of_their_ranks() -> None:
    """Both chunks of rank 0 send to rank 1 over one link; the way back is another."""
    result = equal(4, "interleaved", 2, LinkCost(bandwidth=4.0, latency=0.0))
    found = starts(result)
    assert [found[name] for name in ("0F0", "0F1", "1F0", "1F1", "2F0")] == [0, 1, 2, 3, 4]
    assert found["3F0"] == found["2F0"] + 2


def test_links_of_their_own() -> None:
    links = {(0, 1): LinkCost(1.0, 0.0)}
    costs = profile(block(), block(), links=links)
    found = starts(simulate(costs, Plan((1, 1), ("keep",) * 2), "1f1b", 1, timeline=True))
    assert (found["1F0"], found["0B0"]) == (5, 8)


def test_a_busy_sender_computes_nothing_meanwhile() -> None:
    result = equal(2, "gpipe", 2, LinkCost(bandwidth=8.0, latency=0.0, sender_busy=True))
    found = starts(result)
    assert (found["0F1"], found["1F0"], found["1F1"]) == (1.5, 1.5, 3.0)
    assert found["1B1"] == found["1B0"] + 2.5
    assert result.ranks[0].sending == pytest.approx(2 * 0.5 / result.step_time)
    shares = [rank.compute + rank.sending + rank.bubble for rank in result.ranks]
    assert shares == pytest.approx([1, 1])


def test_recomputing_repeats_the_forward_in_backward() -> None:
    blocks = [block(3), block(5)]
    costs = profile(*blocks)
    kept = simulate(costs, Plan((2,), ("keep", "keep")), "1f1b", 4)
    mixed = simulate(costs, Plan((2,), ("recompute", "keep")), "1f1b", 4)
    assert mixed.step_time - kept.step_time == pytest.approx(4 * 3)
    split = simulate(costs, Plan((2,), ("recompute", "keep")), "zb-h1", 4, timeline=True)
    assert split.step_time == mixed.step_time
    assert split.timeline is not None
    lengths = {event.action.op: event.end - event.start for event in split.timeline.events}
    assert lengths == pytest.approx({Op.F: 8, Op.I: 2 + 3, Op.W: 2, Op.STEP: 0})


def test_swapping_is_free_while_the_host_link_keeps_up() -> None:
    """10 bytes out and 10 back in each 3 s of compute: 20 / 3 bytes a second are enough."""

    def run(host: float, policy: str) -> float:
        costs = profile(*[block()] * 4, host=host)
        return simulate(costs, Plan((1,) * 4, (policy, "keep", "keep", "keep")), "pipedream", 60).step_time

    assert run(20 / 3, "swap") == pytest.approx(run(inf, "keep"))
    assert run(5.0, "swap") == pytest.approx(20 / 5)


def test_swapping_by_hand() -> None:
    """One stage, copies of 2 s: out from 1 to 3 and back from 3 to 5, then the same for the second minibatch."""
    result = simulate(profile(block(), host=5.0), Plan((1,), ("swap",)), "1f1b", 2, timeline=True)
    found = starts(result)
    assert (found["0F0"], found["0B0"]) == (0, 5)
    assert (found["0F1"], found["0B1"]) == (7, 12)
    two = simulate(profile(block(), host=5.0), Plan((1,), ("swap",)), "gpipe", 3, timeline=True)
    found = starts(two)
    # The third forward waits for the first copy out. Out 1-3, 3-5; in 5-7, requested when the third forward
    # started, before there was anything else to copy out: 7-9; in 9-11, 11-13.
    assert [found[f"0F{m}"] for m in range(3)] == [0, 1, 3]
    assert [found[f"0B{m}"] for m in range(3)] == [7, 11, 13]


def test_another_batch_size() -> None:
    costs = profile(block(update=1.0), block())
    plan = Plan((1, 1), ("keep",) * 2, batch_size=6)
    result = simulate(costs, plan, "1f1b", 4)
    assert result.step_time == pytest.approx(3 * 3 * 5 + 1)
    assert result.ranks[0].memory.activations == 2 * 30


def test_new_versions_take_time_where_old_ones_are_read() -> None:
    """PipeDream's last stage updates in place; a flush leaves nobody who reads the old weights."""
    costs = profile(*[block(update=1.0, version=0.5)] * 3)
    plan = Plan((1,) * 3, ("keep",) * 3)
    found = simulate(costs, plan, "pipedream", 24)
    assert [rank.compute * found.step_time for rank in found.ranks] == pytest.approx([4.5, 4.5, 4.0])
    assert simulate(costs, plan, "1f1b", 4).step_time == pytest.approx(3 * (4 + 2) + 1)


@pytest.mark.parametrize("name", NAMES)
def test_the_runtime_takes_its_time_for_each_action(name: str) -> None:
    stages = 8 if name in ("interleaved", "zb-v") else 4
    plan = Plan((1,) * stages, ("keep",) * stages)
    bare = profile(*[block()] * stages)
    longer = replace(block(), forward=block().forward + 0.25, input_gradient=block().input_gradient + 0.25)
    if name.startswith("zb"):
        longer = replace(longer, weight_gradient=block().weight_gradient + 0.25)
    expected = simulate(replace(bare, blocks=(longer,) * stages), plan, name, 16)
    found = simulate(replace(bare, device=replace(bare.device, overhead=0.25)), plan, name, 16)
    assert found.step_time == pytest.approx(expected.step_time)


def test_a_schedule_of_ones_own() -> None:
    schedule = build("1f1b", 3, 5)
    costs, plan = profile(*[block()] * 3, link=LinkCost(4.0, 0.5)), Plan((1,) * 3, ("keep",) * 3)
    named = simulate(costs, plan, "1f1b", 5)
    assert simulate(costs, plan, schedule) == named
    assert simulate(costs, plan, lower(schedule)) == named


@pytest.mark.parametrize(
    ("plan", "schedule", "minibatches", "message"),
    [
        (Plan((1, 2), ("keep",) * 3), None, 4, r"partition \[1, 2\] holds 3 blocks, the profile has 4"),
        (Plan((2, 2), ("keep",) * 4, fingerprint="b"), None, 4, "the plan is for another model"),
        (Plan((2, 1, 1), ("keep",) * 4), "zb-v", 4, "has 3 stages, which 2 a rank does not divide"),
        (Plan((2, 2), ("keep",) * 4), "1f2b", 4, "did you mean '1f1b'"),
        (Plan((2, 2), ("keep",) * 4), build("1f1b", 3, 4), None, "has 2 stages, schedule '1f1b' has 3"),
        (Plan((2, 2), ("keep",) * 4), build("1f1b", 2, 4), 5, "is written for 4 minibatches, not 5"),
        (
            Plan((2, 2), ("keep",) * 4),
            build("2bw", 2, None),
            None,
            "has no end: give the number of minibatches",
        ),
        (Plan((2, 2), ("keep",) * 4, replicas=(2, 1)), "zb-v", 4, "name 2 positions, but there are 1"),
    ],
)
def test_mistakes(plan: Plan, schedule: Any, minibatches: int | None, message: str) -> None:
    costs = profile(*[block()] * 4, fingerprint="a")
    with pytest.raises(VPipeError, match=message):
        simulate(costs, plan, schedule, minibatches)


times = st.floats(0.01, 10)
blocks = st.lists(
    st.builds(
        block,
        times,
        times,
        times,
        update=times,
        swapping=st.just(0.0) | times,
        kept_bytes=st.integers(0, 50),
        boundary_bytes=st.integers(0, 50),
    ),
    min_size=4,
    max_size=4,
)
policies = st.lists(st.sampled_from(["keep", "recompute", "swap"]), min_size=4, max_size=4).map(tuple)
links = st.builds(LinkCost, st.floats(0.5, 100), st.floats(0, 3), st.booleans())


@draws(40)
@given(blocks, policies, links, st.floats(0.5, 100), st.sampled_from(NAMES), st.integers(1, 40))
@example(  # the steady part is one minibatch long, and shorter than the work of a rank that copies
    [block(1, 1, 1, update=update, boundary_bytes=size) for update, size in ((1, 0), (1, 1), (5, 0), (6, 0))],
    ("keep",) * 4,
    LinkCost(1, 1, True),
    1,
    "pipedream",
    10,
)
def test_never_faster_than_the_busiest_rank(
    found: list[BlockCost], chosen: tuple[str, ...], link: LinkCost, host: float, name: str, m: int
) -> None:
    result = simulate(profile(*found, link=link, host=host), Plan((1,) * 4, chosen), name, m)
    work = [
        entry.forward * (2 if policy == "recompute" else 1)
        + entry.backward
        + (entry.swapping if policy == "swap" else 0)
        + entry.update / result.update_interval
        for entry, policy in zip(found, chosen, strict=True)
    ]
    busiest = max(sum(work[stage] for stage in rank.stages) for rank in result.ranks)
    assert result.samples_per_second <= 2 / busiest * (1 + 1e-9)
    for rank in result.ranks:
        assert 0 <= rank.bubble < 1
        assert rank.compute + rank.sending + rank.bubble == pytest.approx(1)


@draws(40)
@given(blocks, links, st.floats(1, 50), st.sampled_from(NAMES), st.integers(1, 20))
def test_a_faster_link_is_never_slower(
    found: list[BlockCost], link: LinkCost, factor: float, name: str, m: int
) -> None:
    plan = Plan((1,) * 4, ("keep",) * 4)
    faster = LinkCost(link.bandwidth * factor, link.latency / factor, link.sender_busy)
    slow, fast = (simulate(profile(*found, link=used), plan, name, m) for used in (link, faster))
    assert fast.makespan <= slow.makespan * (1 + 1e-9)


def test_the_table_says_how_long_an_update_is_that_waits_for_all_ranks() -> None:
    """zb-v: ranks begin and end one after another. By the picture of a rank, 25.5 units instead of 24."""
    blocks = [block(forward=0.5, input_gradient=0.5, weight_gradient=0.5, update=0.0)] * 8
    costs = profile(*blocks)
    result = simulate(costs, Plan((1,) * 8, ("keep",) * 8), "zb-v", 8)
    assert (result.step_time, result.makespan) == (24.0, 25.5)
    assert "25.5 s an update where it waits for all ranks" in str(simulation_table(result, costs).caption)
    plain = simulate(costs, Plan((2,) * 4, ("keep",) * 8), "1f1b", 8)
    assert plain.makespan == plain.step_time
    assert "waits" not in str(simulation_table(plain, costs).caption)
