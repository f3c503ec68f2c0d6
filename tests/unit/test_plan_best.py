"""Plans of small problems against every plan that there is (`tests/every_plan.py`), and bounds against simulations."""

from __future__ import annotations

from math import inf
from random import Random

import numpy as np
import pytest

from tests.every_plan import SCHEDULES, Problem, best_seconds, compositions, drawn, seconds_of
from vpipe.cost import BlockCost, DeviceCost, LinkCost, Plan, Profile
from vpipe.errors import VPipeError
from vpipe.plan import PlanResult, plan
from vpipe.plan.paths import Paths
from vpipe.plan.report import plan_table
from vpipe.plan.shape import SAMPLES_WORTH, PlanShape
from vpipe.plan.task import Task
from vpipe.plan.trials import NOISE
from vpipe.schedule import kind_of
from vpipe.schedule.kind import too_shallow
from vpipe.simulate import simulate

STAIRCASE = ("1f1b", "zb-h1", "pipedream", "2bw")


def planned(problem: Problem) -> PlanResult | None:
    try:
        return plan(problem.profile, problem.ranks, problem.cap, problem.schedule, problem.minibatches)
    except VPipeError:
        return None


def check_best(problem: Problem, deepest: int = 3) -> None:
    """The plan takes what a simulation says, fits, and is as fast as any of these depths, on all ranks or fewer."""
    result = planned(problem)
    best = best_seconds(problem, problem.ranks if result is None else result.update_interval, deepest)
    if result is None:
        assert best == inf
        return
    found = simulate(problem.profile, result.to_plan())
    assert result.seconds == seconds_of(found)
    assert all(rank.memory.total <= problem.cap for rank in found.ranks)
    assert max(result.depth, default=0) > deepest or result.seconds >= best * (1 - 1e-9)
    if kind_of(problem.schedule).synchronous:
        assert result.seconds <= best * (1 + 1e-9)
        assert result.gap is None
    else:
        # On hosts there are more depths and placements than can be looked at: the plan says how far off it may be.
        assert result.gap is None or problem.profile.hosts is not None
        assert result.seconds <= best * SAMPLES_WORTH  # a depth that makes weights older has to be worth it
    assert sum(result.replicas) + result.idle == problem.ranks


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(3))
def test_the_plan_is_the_best(schedule: str, seed: int) -> None:
    check_best(drawn(Random(seed), schedule, range(4, 7), range(2, 5), capped=False))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(10, 13))
def test_the_plan_is_the_best_of_odd_blocks(schedule: str, seed: int) -> None:
    """Very uneven times, a giant, boundaries and weights that are huge or nothing."""
    check_best(drawn(Random(seed), schedule, range(2, 7), range(2, 4), capped=False, odd=True))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "pipedream", "2bw"])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_the_plan_is_the_best_where_memory_is_short(schedule: str, seed: int) -> None:
    check_best(drawn(Random(seed), schedule, range(4, 5), range(2, 3), capped=True))


def test_less_depth_makes_a_plan_fit() -> None:
    """A version of the weights, or a gradient, has 100 bytes; three stages have three versions, two, and one."""
    blocks = tuple(BlockCost("b", 1.0, 1.0, 1.0, 0.0, 4, 0, 100) for _ in range(3))
    profile = Profile(blocks, DeviceCost(10**6, 1e9, 1e9), LinkCost(1e9, 0.0), 1, optimizer_ratio=0.0)
    for cap, depth, seconds in ((420, (), 3), (320, (1, 1, 0), 6), (250, (0, 0, 0), 9)):
        found = plan(profile, 3, cap, "pipedream")
        assert (found.depth, found.seconds) == (depth, pytest.approx(seconds))
    with pytest.raises(VPipeError, match="what would fit: a memory of 200 bytes"):
        plan(profile, 3, 199, "pipedream")
    assert plan(profile, 3, 200, "pipedream").seconds == pytest.approx(9)


def test_a_rank_stays_idle_where_it_would_only_cost() -> None:
    """Two blocks make two stages; a replica on the third rank would send 1000 bytes for each update."""
    blocks = tuple(BlockCost("b", 1.0, 1.0, 1.0, 0.0, 4, 0, 1000) for _ in range(2))
    profile = Profile(blocks, DeviceCost(10**6, 1e9, 1e9), LinkCost(10.0, 0.0), 1)
    for schedule in ("1f1b", "pipedream"):
        found = plan(profile, 3, schedule=schedule)
        assert (found.replicas, found.idle, found.to_plan().idle) == ((1, 1), 1, 1)
        assert plan(profile, 3, schedule=schedule, all_ranks=True).seconds > found.seconds
    assert "rank 2 is idle" in (plan_table(found).caption or "")


def slow_cut(schedule: str, ranks: int = 2, memory: int = 10**6) -> PlanResult:
    """One cut is slow: 4 blocks of 30 s, and 58 s for a message between the second and the third."""
    blocks = tuple(BlockCost("b", 10.0, 10.0, 10.0, 0.0, 4, cut, 3) for cut in (0, 58, 0, 0))
    profile = Profile(blocks, DeviceCost(memory, 1e9, 1e9), LinkCost(1.0, 0.0), 1)
    result = plan(profile, ranks, schedule=schedule, minibatches=8 if schedule == "1f1b" else None)
    found = simulate(profile, result.to_plan())
    assert result.seconds == seconds_of(found)
    return result


def test_a_slow_cut_is_avoided_or_hidden() -> None:
    """By sums (2, 2) takes 60 s a minibatch. It takes 118 with its own depth, 60 with 4 in flight; (3, 1) takes 90."""
    result = slow_cut("pipedream")
    assert result.seconds == pytest.approx(60, rel=0.01)
    if result.replicas == (1, 1):
        assert (result.partition, result.depth) == ((2, 2), (3, 0))
    for schedule in ("2bw", "1f1b"):
        assert slow_cut(schedule).seconds < 90


def test_depth_is_chosen_under_the_cap() -> None:
    """No replicas help where weights are large: then a depth hides the message, if there is room for it."""
    blocks = tuple(BlockCost("b", 10.0, 10.0, 10.0, 0.0, 4, cut, 500) for cut in (0, 58, 0, 0))
    profile = Profile(blocks, DeviceCost(10**6, 1e9, 1e9), LinkCost(1.0, 0.0), 1)
    deep = plan(profile, 2, 10**6, "pipedream")
    assert (deep.partition, deep.replicas, deep.depth) == ((2, 2), (1, 1), (3, 0))
    assert deep.seconds == pytest.approx(60, rel=0.02)
    needed = max(position.memory.total for position in deep.positions)
    less = plan(profile, 2, needed - 900, "pipedream")  # a version less
    assert less.seconds > deep.seconds
    assert all(position.memory.total < needed for position in less.positions)


def test_zb_takes_the_memory_of_zb_2p_if_there_is_room() -> None:
    blocks = (BlockCost("b", 1.0, 1.0, 1.0, 0.0, 10, 0, 1),) * 4
    profile = Profile(blocks, DeviceCost(10**6, 1e9, 1e9), LinkCost(1e9, 0.0), 1)
    result = plan(profile, 4, 79, "zb-h1", minibatches=8)
    if result.replicas == (1, 1, 1, 1):
        assert result.depth == (6, 4, 2, 0)
        assert result.seconds == pytest.approx(3)
    assert plan(profile, 4, 45, "zb-h1", minibatches=8).depth == ()


def test_no_simulation_is_below_its_bound() -> None:
    random = Random(7)
    for _ in range(60):
        schedule = random.choice(("1f1b", "gpipe", "zb-h1", "pipedream", "2bw"))
        problem = drawn(random, schedule, range(2, 8), range(1, 5), capped=False)
        stages = random.randint(1, min(problem.blocks, problem.ranks))
        replicas = random.choice(list(compositions(problem.ranks, stages)))
        partition = random.choice(list(compositions(problem.blocks, stages)))
        drawn_depth = tuple(sorted((random.randint(0, 6) for _ in range(stages)), reverse=True))
        joint = not kind_of(schedule).synchronous
        fits = schedule in STAIRCASE and too_shallow(replicas, drawn_depth, joint=joint) is None
        task = Task(
            problem.profile,
            problem.ranks,
            10**9,
            kind_of(schedule),
            problem.minibatches,
            None,
            problem.profile,
        )
        shape = PlanShape(task, replicas, drawn_depth if fits else None)
        cuts = np.cumsum((0, *partition))[None, :]
        bounds = Paths(problem.profile).bounds(shape.facts, cuts)
        found = simulate(
            problem.profile,
            Plan(
                partition, ("keep",) * problem.blocks, schedule, replicas, problem.minibatches,
                update_interval=shape.interval, depth=shape.depth or (),
            ),
        )  # fmt: skip
        assert seconds_of(found) >= bounds.least[0] * (1 - 1e-9)
        assert seconds_of(found) >= bounds.expected[0] * NOISE
        anything = Paths(problem.profile).of_any_partition(shape.any_depth, problem.ranks)
        assert seconds_of(found) >= anything * (1 - 1e-6)


def test_a_search_that_is_cut_short_says_how_far_it_may_be_from_the_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = drawn(Random(3), "1f1b", range(7, 8), range(4, 5), capped=False)
    best = planned(problem)
    monkeypatch.setattr("vpipe.plan.trials.EFFORT", 1)
    short = planned(problem)
    assert best is not None
    assert short is not None
    assert short.seconds >= best.seconds
    if short.gap is None:
        assert short.seconds == best.seconds
    else:
        assert short.seconds / (1 + short.gap) <= best.seconds * (1 + 1e-9)
        assert short.to_plan().prediction["gap"] == short.gap
