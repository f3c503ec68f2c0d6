"""Simulated time with several hosts: by hand, and against lines that are served again from the events alone."""

from collections import defaultdict
from dataclasses import replace
from math import inf
from random import Random
from typing import Any

import pytest
import torch

from tests import every_plan
from tests.every_plan import SCHEDULES, on_hosts
from vpipe.cost import BlockCost, DeviceCost, Hosts, LinkCost, Plan, Profile, bucket_count
from vpipe.cost import costs as costs_module
from vpipe.errors import VPipeError
from vpipe.runtime import buckets
from vpipe.schedule import Action, Event, Op, kind_of
from vpipe.simulate import Simulation, simulate

FREE = LinkCost(inf, 0.0)
PAIRS = ((0, 1), (2, 3))


def block(*times: float, **more: Any) -> BlockCost:
    sizes = {"update": 0.0, "kept_bytes": 10, "boundary_bytes": 4, "parameter_bytes": 0} | more
    return BlockCost("block", *(times or (1.0, 1.0, 1.0)), **sizes)


def profile(
    *blocks: BlockCost, hosts: tuple[tuple[int, ...], ...], link: LinkCost = FREE, **more: Any
) -> Profile:
    return Profile(blocks, DeviceCost(10**9, inf, inf), FREE, 1, hosts=Hosts(hosts, link), **more)


def run(costs: Profile, replicas: tuple[int, ...], schedule: str, minibatches: int) -> Simulation:
    blocks = len(costs.blocks)
    chunks = kind_of(schedule).chunks
    plan = Plan(
        (1,) * blocks, ("keep",) * blocks, schedule, replicas, minibatches, chunks if chunks > 1 else None
    )
    return simulate(costs, plan, timeline=True)


def starts(simulation: Simulation) -> dict[str, float]:
    assert simulation.timeline is not None
    return {str(event.action): event.start for event in simulation.timeline.events}


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "pipedream", "zb-h1"])
def test_hosts_of_one_rank_are_ranks_with_a_link(name: str) -> None:
    slow = LinkCost(2.0, 0.0)
    hosts = profile(block(), block(), hosts=((0,), (1,)), link=slow)
    found, plain = (run(costs, (1, 1), name, 12) for costs in (hosts, replace(hosts, hosts=None, link=slow)))
    assert replace(found, timeline=None) == replace(plain, timeline=None)
    assert starts(found) == starts(plain)


def test_ranks_of_a_host_send_one_after_the_other() -> None:
    """Two forwards end at 1 and send 2 s each; latency does not hold up the card."""
    found = starts(run(profile(block(), block(), hosts=PAIRS, link=LinkCost(2.0, 0.5)), (2, 2), "gpipe", 4))
    assert [found[f"1F{m}"] for m in range(4)] == [3.5, 5.5, 7.5, 9.5]
    near = starts(
        run(profile(block(), block(), hosts=((0, 2), (1, 3)), link=LinkCost(2.0)), (2, 2), "gpipe", 4)
    )
    assert [near[f"1F{m}"] for m in range(4)] == [1, 1, 2, 2]


def test_messages_of_several_hosts_arrive_one_after_the_other() -> None:
    costs = profile(block(), block(), hosts=((0,), (1,), (2,)), link=LinkCost(2.0))
    found = starts(run(costs, (2, 1), "gpipe", 2))
    assert [found[f"1F{m}"] for m in range(2)] == [3, 5]
    assert found["0B0"] == found["1B0"] + 4
    assert found["0B1"] == max(found["1B1"] + 2, found["1B0"] + 4) + 2


def test_links_of_pairs_of_hosts() -> None:
    link = {(0, 1): LinkCost(1.0)}
    costs = profile(block(), block(), hosts=((0,), (1,)), link=LinkCost(4.0))
    costs = replace(costs, hosts=Hosts(((0,), (1,)), LinkCost(4.0), link))
    found = starts(run(costs, (1, 1), "1f1b", 1))
    assert (found["1F0"], found["0B0"]) == (5, 9)


def test_replicas_of_two_hosts_share_the_cards() -> None:
    """Of 8 bytes each host adds up its own, and each of its 2 ranks sends 2 bytes, twice, to the other host."""
    costs = profile(block(parameter_bytes=8), hosts=PAIRS, link=LinkCost(1.0, 0.25))
    found = starts(run(costs, (4,), "gpipe", 4))
    assert found["0STEP3"] == 3 + 8 + 0.5
    apart = starts(
        run(profile(block(parameter_bytes=8), hosts=((0, 1), (2, 3)), link=LinkCost(1.0)), (2,), "gpipe", 2)
    )
    assert apart["0STEP1"] == 3


@pytest.mark.parametrize(("bandwidth", "late"), [(8.0, 1 / 8), (1.0, 8 - 2 * 7 / 8)])
def test_a_reduction_between_hosts_overlaps_the_last_backward(
    bandwidth: float, late: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In eight buckets: what is left is the last one, or all that the backward of 2 s was too short for."""
    monkeypatch.setattr("vpipe.cost.costs.BUCKET", 1)
    costs = profile(block(parameter_bytes=8), hosts=((0,), (1,)), link=LinkCost(bandwidth))
    assert starts(run(costs, (2,), "gpipe", 2))["0STEP1"] == pytest.approx(3 + late)


def test_the_simulator_counts_the_buckets_of_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (costs_module.MOST_BUCKETS, costs_module.BUCKET) == (buckets.MOST_BUCKETS, buckets.BUCKET)
    monkeypatch.setattr(costs_module, "BUCKET", 40)
    monkeypatch.setattr(buckets, "BUCKET", 40)
    for count in (1, 10, 11, 20, 21, 500):
        parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(count)]
        assert bucket_count(4 * count) == len(buckets.make_buckets(parameters))


def test_reductions_of_two_stages_take_turns() -> None:
    """Ranks 0 and 2 hold stage 0, 1 and 3 stage 1: all messages stay on a host, both reductions leave it.

    In one bucket each, of 4 s there and 4 s back. The backward of stage 1 ends at 4, that of stage 0 at 6:

        4       8       12       16       20
        1 there 0 there  1 back   0 back
    """
    blocks = (block(parameter_bytes=8), block(parameter_bytes=8))
    costs = profile(*blocks, hosts=((0, 2), (1, 3)), link=LinkCost(1.0))
    found = starts(run(costs, (2, 2), "gpipe", 2))
    assert (found["1STEP1"], found["0STEP1"]) == (16, 20)


@pytest.mark.parametrize(("bucket", "waits"), [(8, 0.0), (4, 1.0), (1, 0.25)])
def test_a_message_waits_for_the_part_of_a_bucket_under_way(
    bucket: int, waits: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stage 0 is on rank 0 of the first host, stage 1 on ranks 1, of the second, and 2, of the first.

    Both backwards of stage 1 end at 5. Their reductions take 8 s; of two or more buckets the first is ready before. The
    gradient of rank 1 goes first where nothing is under way, else behind one part.
    """
    monkeypatch.setattr("vpipe.cost.costs.BUCKET", bucket)
    blocks = (block(boundary_bytes=1), block(parameter_bytes=8))
    costs = profile(*blocks, hosts=((0, 2), (1,)), link=LinkCost(1.0))
    assert starts(run(costs, (1, 2), "gpipe", 2))["0B0"] == pytest.approx(5 + waits + 1)


def test_more_ranks_than_the_hosts_have_are_refused() -> None:
    with pytest.raises(VPipeError, match="3 ranks are to be placed, and the hosts of the profile have 2"):
        run(profile(*[block()] * 3, hosts=((0,), (1,)), link=FREE), (1, 1, 1), "1f1b", 4)


def drawn(random: Random) -> tuple[Profile, Simulation]:
    name = random.choice(SCHEDULES)
    kind = kind_of(name)
    positions = random.choice([2, 3, 4]) // kind.chunks or 1
    replicas = tuple(random.randint(1, 3) for _ in range(positions))
    if kind.replicas == "equal":
        replicas = (random.randint(1, 2),) * positions
    order = list(range(sum(replicas)))
    random.shuffle(order)
    cut = random.randint(0, len(order))
    hosts = tuple(tuple(own) for own in (order[:cut], order[cut:]) if own)
    blocks = [
        block(*(random.uniform(0.3, 1.5) for _ in range(3)), boundary_bytes=random.randint(0, 9),
              parameter_bytes=random.randint(0, 20))
        for _ in range(positions * kind.chunks)
    ]  # fmt: skip
    link = LinkCost(random.choice([1.0, 5.0, 50.0]), random.choice([0.0, 0.3]))
    costs = replace(profile(*blocks, hosts=hosts, link=link), link=LinkCost(random.choice([9.0, 1e9])))
    return costs, run(costs, replicas, name, random.randint(3, 12))


@pytest.mark.parametrize("seed", range(24))
def test_the_numbers_of_a_hosts_ranks_do_not_matter(seed: int) -> None:
    """Those of a host are exchanged: another rank number runs each replica, over the same links."""
    random = Random(seed)
    schedule = ("pipedream", "2bw", "1f1b")[seed % 3]
    problem = on_hosts(random, every_plan.drawn(random, schedule, [4, 5], [5], capped=False), (3, 2))
    hosts = problem.profile.hosts
    assert hosts is not None
    plan = random.choice([one for one in every_plan.layouts(problem) if max(one.replicas) > 1])
    if schedule == "2bw":
        plan = replace(plan, update_interval=15)
    other = {one: one for one in range(5)}
    for own in hosts.ranks:
        other |= dict(zip(own, random.sample(own, len(own)), strict=True))
    moved = replace(plan, placement=tuple(tuple(other[rank] for rank in ranks) for ranks in plan.placement))
    assert simulate(problem.profile, plan).step_time == simulate(problem.profile, moved).step_time


Part = tuple[float, list[tuple[object, float]]]
"""What is sent at once: when it is there, and its lines with the seconds that each carries it."""


def deliver(parcels: dict[tuple[int, ...], list[Part]]) -> dict[tuple[int, ...], float]:
    """When the last part of each has left its last line.

    Lines carry one part after the other as they come. A part comes to its second line when the first begins with it;
    the next part of a parcel comes when the one before it has left its lines. At one time the lower name is first.
    """
    free: dict[object, float] = defaultdict(float)
    left: dict[tuple[int, ...], float] = {}
    coming = [(parts[0][0], name, 0, 0) for name, parts in parcels.items()]
    while coming:
        time, name, part, step = first = min(coming)
        coming.remove(first)
        lines = parcels[name][part][1]
        line, seconds = lines[step]
        start = max(time, free[line])
        free[line] = left[name] = start + seconds
        if step + 1 < len(lines):
            coming.append((start, name, part, step + 1))
        elif part + 1 < len(parcels[name]):
            coming.append((max(left[name], parcels[name][part + 1][0]), name, part + 1, 0))
    return left


@pytest.mark.parametrize("seed", range(40))
def test_every_action_starts_when_its_messages_are_there(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No action is later or earlier than its rank and the lines, served in the order of time, allow."""
    size = (4 * 2**20, 5, 1)[seed % 3]
    monkeypatch.setattr("vpipe.cost.costs.BUCKET", size)
    costs, found = drawn(Random(seed))
    hosts = costs.hosts
    assert hosts is not None
    assert found.timeline is not None
    events = {(event.rank, event.action): event for event in found.timeline.events}
    holders: dict[int, set[int]] = defaultdict(set)
    for rank, action in events:
        holders[action.stage].add(rank)
    ran = {action: rank for rank, action in events if action.op in (Op.F, Op.B, Op.I)}
    parcels: dict[tuple[int, ...], list[Part]] = {}
    latency: dict[tuple[int, ...], float] = defaultdict(float)
    arrived: dict[tuple[int, ...], float] = {}
    for action, rank in ran.items():
        reader = action.stage + (1 if action.op is Op.F else -1)
        if not 0 <= reader < len(holders):
            continue
        other = next(r for one, r in ran.items() if one[0] == reader and one[1:] == action[1:])
        size = costs.blocks[min(reader, action.stage)].boundary_bytes
        end, name = events[rank, action].end, (action.minibatch, action.stage, reader)
        here, there = hosts.host_of(rank), hosts.host_of(other)
        if rank == other:
            arrived[name] = end
        elif here == there:
            parcels[name] = [(end, [((rank, other), costs.link.seconds(size))])]
        else:
            seconds = size / hosts.link.bandwidth
            parcels[name] = [(end, [(("out", here), seconds), (("into", there), seconds)])]
            latency[name] = hosts.link.latency
    reduced: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in found.timeline.events:
        if event.action.op is Op.REDUCE:
            reduced[event.action.stage, event.action.minibatch].append(event)
    for (stage, minibatch), joined in reduced.items():
        own = holders[stage]
        # With the last replica. One may have had no minibatch of the last update, and so no backward since its STEP.
        last = max(joined, key=lambda event: event.start)
        before = (
            one for one in reversed(found.timeline.events) if one.rank == last.rank and one.end <= last.start
        )
        backward = next(one for one in before if one.action.stage == stage and one.action != last.action)
        lasting = backward.end - backward.start if backward.action.op in (Op.B, Op.W) else 0.0
        count = bucket_count(costs.blocks[stage].parameter_bytes)
        ready = [last.end - lasting * (count - 1 - one) / count for one in range(count)]
        for rank in own:
            here = hosts.host_of(rank)
            far = sum(hosts.host_of(other) != here for other in own)
            if far:
                # The rank's share of its host's sums, half of it for each of the two hosts, there and back.
                share = costs.blocks[stage].parameter_bytes / (len(own) - far) / 2
                seconds = share / hosts.link.bandwidth / count
                way = [(("out", here), seconds), (("into", here), seconds)]
                name = (99, minibatch, stage, rank)
                parcels[name] = [(time, way) for time in ready for _ in ("there", "back")]
                latency[name] = 2 * hosts.link.latency
    arrived |= {name: time + latency[name] for name, time in deliver(parcels).items()}
    free: dict[int, float] = defaultdict(float)
    for event in found.timeline.events:
        stage, op, minibatch = action = event.action
        needed = [free[event.rank]]
        if op is Op.F and stage:
            needed.append(arrived[minibatch, stage - 1, stage])
        if op in (Op.B, Op.I):
            needed += [arrived[name] for name in [(minibatch, stage + 1, stage)] if name in arrived]
        if op is Op.STEP and len(holders[stage]) > 1:
            for rank in holders[stage]:
                end = events[rank, Action(stage, Op.REDUCE, minibatch)].end
                needed += [end, arrived.get((99, minibatch, stage, rank), end)]
        assert event.start == pytest.approx(max(needed), abs=1e-9), action
        free[event.rank] = event.end
