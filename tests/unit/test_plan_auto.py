"""`--schedule auto` against every schedule, planned without any limit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import inf
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.drawing import draws
from tests.unit.test_plan_optimal import FREE, MINIBATCHES, made_of, problems
from vpipe.cost import BlockCost, DeviceCost, LinkCost, Profile, as_scheduled
from vpipe.errors import VPipeError
from vpipe.plan import PlanResult, plan
from vpipe.plan.one_schedule import plan_schedule
from vpipe.plan.planner import kinds_of
from vpipe.plan.task import Task
from vpipe.schedule import kind_of

UPDATED = replace(FREE, update=1 / 16, version=1 / 32)
FAR = {(0, 1): LinkCost(2.0, 0.0), (1, 0): LinkCost(50.0, 0.0, sender_busy=True)}
"""Of all links these two are other ones."""


def task_of(profile: Profile, ranks: int, cap: int, name: str, minibatches: int) -> Task:
    kind = kind_of(name)
    task = Task(profile, ranks, cap, kind, minibatches if kind.synchronous else None, None, profile)
    return task._replace(profile=as_scheduled(profile, task.kind.splits_backward, task.update_interval))


def auto(profile: Profile, ranks: int, cap: int, minibatches: int, **more: int) -> PlanResult | None:
    """By samples a second; `test_slowdown.py` weighs stale weights."""
    try:
        return plan(profile, ranks, cap, "auto", minibatches, training=None, **more)
    except VPipeError:
        return None


def check_auto(profile: Profile, ranks: int, cap: int, minibatches: int) -> str | None:
    """The schedule that is the first of the fastest, as `auto` must say."""
    found = [
        (name, inf if (one := plan_schedule(task)) is None else one.seconds)
        for name in [kind.name for kind in kinds_of("auto")]
        for task in [task_of(profile, ranks, cap, name, minibatches)]
    ]
    result, least = auto(profile, ranks, cap, minibatches), min(seconds for _, seconds in found)
    if result is None:
        assert least == inf
        return None
    assert result.seconds == pytest.approx(least, rel=1e-8, abs=1e-12)
    assert result.schedule in [name for name, seconds in found if seconds <= least * (1 + 1e-8) + 1e-12]
    return result.schedule


@draws(4)
@given(problems(), st.sampled_from([(1, 1.0), (2, 1.0), (2, 1.5)]), st.booleans())
# Ranks that share a device are quicker while others wait; a limit that did not know it left the best out.
@example((made_of(UPDATED, replace(FREE, weight_gradient=0.25, parameter_bytes=1)), 2, 2), (2, 1.5), False)
def test_auto_is_the_fastest_of_all(
    problem: tuple[Profile, int, int], sharing: tuple[int, float], far: bool
) -> None:
    profile, ranks, cap = problem
    device = replace(profile.device, shared_by=sharing[0], crowding=sharing[1])
    check_auto(replace(profile, device=device, links=FAR if far else {}), ranks, cap, MINIBATCHES)


@pytest.mark.parametrize(
    ("count", "different"), [pytest.param(12, 3, marks=[pytest.mark.long, pytest.mark.timeout(900)])]
)
def test_auto_is_the_fastest_of_all_on_more_ranks(count: int, different: int) -> None:
    """Larger models, of which different schedules are the best."""
    random, best = Random(3), Counter[str]()
    for number in range(count):
        blocks = tuple(
            BlockCost(
                "b", *(random.randint(2, 9) / 4 for _ in range(3)), random.choice([0.0, 0.5, 4.0]),
                random.randint(1, 30), random.randint(0, 4), random.randint(0, 9), deferred_bytes=random.randint(0, 9),
            )
            for _ in range(10)
        )  # fmt: skip
        device = DeviceCost(1, random.choice([2.0, 90.0]), random.choice([2.0, 90.0]), 0.1)
        profile = Profile(blocks, device, LinkCost(random.choice([1.0, 20.0]), 0.01), 1, 1.0)
        minibatches, cap = random.choice([3, 24]), random.choice([150, 300, 900])
        best[str(check_auto(profile, 4 + 2 * (number % 2), cap, minibatches))] += 1
    assert len(best) >= different, best


@draws(5)
@given(
    problems(),
    st.sampled_from([kind.name for kind in kinds_of("auto") if kind.synchronous]),
    st.integers(1, 12),
    st.booleans(),
    st.sampled_from([1.0, 1.5]),
)
# Ranks that share a device are quicker than the profile's times, which are those while all of them compute.
@example((made_of(FREE, UPDATED), 1, 1), "1f1b", 1, False, 1.5)
def test_no_plan_is_skipped_that_is_within_the_limit(
    problem: tuple[Profile, int, int], name: str, minibatches: int, far: bool, crowding: float
) -> None:
    profile, ranks, cap = problem
    device = replace(profile.device, shared_by=2, crowding=crowding)
    profile = replace(profile, device=device, links=FAR if far else {})
    task = task_of(profile, ranks, cap, name, minibatches)
    result = plan_schedule(task)
    if result is not None:
        again = plan_schedule(task, result.seconds)
        assert again is not None
        assert again.seconds == pytest.approx(result.seconds, rel=1e-8)


def test_the_batch_size_is_the_best_too() -> None:
    """The sizes between the powers of two are searched under the limit of the best of these."""
    block = BlockCost("b", 1.0, 1.0, 1.0, 4.0, 50, 10, 20)
    profile = Profile((block,) * 6, DeviceCost(1, 1e9, 1e9, 0.3), LinkCost(100.0, 0.0), 4)
    result = plan(profile, 3, 2000, "auto", 6, "auto", training=None)
    rates = [
        found.samples_per_second
        for size in range(1, 40, 3)
        if (found := auto(profile, 3, 2000, 6, batch_size=size)) is not None
    ]
    assert result.samples_per_second == pytest.approx(max(rates), rel=0.05)
    fixed = auto(profile, 3, 2000, 6, batch_size=result.batch_size)
    assert fixed is not None
    assert fixed.seconds == pytest.approx(result.seconds)
