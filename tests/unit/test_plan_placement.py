"""Plans for several hosts against every plan that there is, with every placement (`tests/every_plan.py`)."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest

from tests.every_plan import SCHEDULES, Problem, drawn, layouts, on_hosts, seconds_of
from tests.unit.test_plan_best import check_best
from vpipe.cost import BlockCost, DeviceCost, Hosts, LinkCost, Profile
from vpipe.plan import PlanResult, plan
from vpipe.plan.chunks_by_simulation import ChunkedSearch
from vpipe.plan.paths import Paths
from vpipe.plan.placements import placements as tried
from vpipe.plan.shape import PlanShape
from vpipe.plan.task import Task
from vpipe.plan.trials import NOISE
from vpipe.schedule import build, kind_of
from vpipe.simulate import simulate

SIZES = ((2, 2), (2, 2), (3, 1), (2, 1, 1))


def problem(seed: int, schedule: str) -> Problem:
    random = Random(seed)
    found = drawn(random, schedule, range(4, 6), range(4, 5), capped=False)
    return on_hosts(random, found, SIZES[seed % len(SIZES)])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 8))])
def test_the_plan_is_the_best(schedule: str, seed: int) -> None:
    check_best(problem(seed, schedule))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_the_plan_is_the_best_where_memory_is_short(seed: int) -> None:
    random = Random(seed)
    found = drawn(random, ("1f1b", "pipedream")[seed % 2], range(4, 5), range(3, 4), capped=True)
    check_best(on_hosts(random, found, (2, 1)))


@pytest.mark.parametrize("seed", range(60))
def test_no_simulation_is_below_its_bound(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = Random(seed)
    monkeypatch.setattr("vpipe.cost.costs.BUCKET", random.choice([1, 4 * 2**20]))
    schedule = random.choice(SCHEDULES)
    found = problem(seed, schedule)
    kind = kind_of(schedule)
    every = list(layouts(found))
    if not every:  # fewer blocks than chunks
        return
    made = random.choice(every)
    replicas, placement = made.replicas, made.placement
    cuts = np.cumsum((0, *made.partition))[None, :]
    task = Task(found.profile, 4, 10**9, kind, found.minibatches, None, found.profile)
    if kind.chunks > 1:
        placed = build(schedule, len(replicas), found.minibatches, replicas=replicas, placement=placement)
        least = expected = ChunkedSearch(task).bounds(placed, cuts)[0]
    else:
        shape = PlanShape(task, replicas, placement=placement)
        made = replace(made, update_interval=shape.interval)
        least, expected = (each[0] for each in Paths(found.profile).bounds(shape.facts, cuts))
        anywhere = PlanShape(task, replicas)
        assert Paths(found.profile).bounds(anywhere.facts, cuts).least[0] <= least * (1 + 1e-9)
    seconds = seconds_of(simulate(found.profile, made))
    assert seconds >= least * (1 - 1e-9)
    assert seconds >= expected * NOISE


def profile(cuts: tuple[int, ...], parameters: int, link: LinkCost, **more: Any) -> Profile:
    blocks = tuple(BlockCost("b", 1.0, 1.0, 1.0, 0.0, 4, cut, parameters) for cut in cuts)
    hosts = Hosts(((0, 1), (2, 3)), link)
    return Profile(blocks, DeviceCost(10**6, 1e9, 1e9), LinkCost(1e4), 1, hosts=hosts, **more)


def hosts_of(result: PlanResult) -> list[list[int]]:
    """Of each position's ranks."""
    return [[rank // 2 for rank in position.ranks] for position in result.positions]


def test_the_cut_with_the_fewest_bytes_is_between_hosts() -> None:
    """Stages of two blocks each would have 50 bytes cross; memory leaves no room for replicas."""
    result = plan(profile((50, 50, 2, 50, 50, 0), 100, LinkCost(5.0)), 4, 1000, "1f1b", 8)
    assert result.replicas == (1, 1, 1, 1)
    assert hosts_of(result) == [[0], [0], [1], [1]]
    assert sum(result.partition[:2]) == 3


def test_replicas_stay_on_a_host_where_gradients_are_large() -> None:
    result = plan(profile((1, 1, 1, 0), 1000, LinkCost(10.0)), 4, None, "1f1b", 8)
    assert all(len(set(own)) == 1 for own in hosts_of(result))


def test_replicas_are_on_different_hosts_where_activations_are_large() -> None:
    """Each host has a pipeline of its own, or one stage: what leaves it are gradients only."""
    result = plan(profile((1000, 1000, 1000, 0), 1, LinkCost(10.0)), 4, None, "1f1b", 8)
    for minibatch in range(4):
        assert len({own[minibatch % len(own)] for own in hosts_of(result)}) == 1


def test_hosts_that_are_alike_are_tried_once() -> None:
    def count(replicas: tuple[int, ...], sizes: tuple[int, ...], **links: Any) -> int:
        ends = np.cumsum((0, *sizes)).tolist()
        own = tuple(tuple(range(a, b)) for a, b in pairwise(ends))
        found = replace(profile((0,), 0, LinkCost(1.0)), hosts=Hosts(own, LinkCost(1.0), **links))
        made, complete = tried(found, replicas)
        assert complete
        assert all(
            sorted(rank for ranks in one for rank in ranks) == list(range(sum(replicas))) for one in made
        )
        return len(set(made))

    assert count((1, 1, 1, 1), (2, 2)) == 3
    assert count((2, 2), (2, 2)) == 3
    assert count((2, 2), (3, 1)) == 4
    assert count((2, 2), (2, 2), links={(0, 1): LinkCost(2.0)}) == 6
    assert count((4, 4), (4, 4)) == 35
    assert count((1,) * 8, (2, 2, 2, 2)) == 105
    assert count((2, 1), (4,)) == 1


def test_many_ranks_are_placed_in_order_or_in_bands() -> None:
    own = tuple(tuple(range(8 * host, 8 * host + 8)) for host in range(4))
    found = replace(profile((0,), 0, LinkCost(1.0)), hosts=Hosts(own, LinkCost(1.0)))
    made, complete = tried(found, (4,) * 8)
    assert not complete
    assert [[one[0], one[1]] for one in made] == [
        [(0, 1, 2, 3), (4, 5, 6, 7)],
        [(0, 1, 8, 9), (2, 3, 10, 11)],
        [(0, 8, 16, 24), (1, 9, 17, 25)],
    ]


def test_a_plan_of_many_ranks_has_a_gap() -> None:
    blocks = tuple(BlockCost("b", 0.1, 0.1, 0.1, 0.0, 4, 100 + number % 7, 10) for number in range(40))
    own = tuple(tuple(range(4 * host, 4 * host + 4)) for host in range(4))
    hosts = Hosts(own, LinkCost(1e3, 1e-3))
    costs = Profile(blocks, DeviceCost(10**6, 1e9, 1e9), LinkCost(1e5), 1, hosts=hosts)
    result = plan(costs, 16, schedule="1f1b", minibatches=32)
    assert result.seconds == seconds_of(simulate(costs, result.to_plan()))
    assert result.gap is not None
    plain = plan(replace(costs, hosts=None, link=LinkCost(1e5)), 16, schedule="1f1b", minibatches=32)
    assert result.seconds >= plain.seconds * (1 - 1e-9) / (1 + (plain.gap or 0))
