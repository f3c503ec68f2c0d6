"""Many ranks at once: the same figures as one event after the other, in as many steps as there are waves."""

from __future__ import annotations

from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.drawing import draws
from tests.schedules import CHUNKED, NAMES
from vpipe.cost import BlockCost, DeviceCost, LinkCost, Plan, Profile
from vpipe.schedule import Deadlock, Schedule, build
from vpipe.schedule.program import listed
from vpipe.simulate import Simulation, simulate, simulation, waves


def random_profile(blocks: int, random: Random, **more: Any) -> Profile:
    def number() -> float:
        return random.choice((0.0, 0.5, 1.0, random.random()))

    def size() -> int:
        return random.choice((0, 1, random.randrange(100)))

    def link() -> LinkCost:
        return LinkCost(random.choice((1.0, 50.0)), random.choice((0.0, 0.3)), random.random() < 0.3)

    return Profile(
        tuple(
            BlockCost("b", number(), number(), number(), number(), size(), size(), size(), version=number())
            for _ in range(blocks)
        ),
        DeviceCost(10**9, 1.0, 1.0, number() / 4),
        link(),
        2,
        links={(a, b): link() for a in range(4) for b in range(4) if a != b and random.random() < 0.3},
        **more,
    )


def both_ways(
    profile: Profile, plan: Plan, schedule: Schedule | str, minibatches: int | None
) -> list[Simulation]:
    """In waves, and one event after the other."""
    found = []
    for least in (1, 10**9):
        with patch.object(simulation, "MANY_RANKS", least):
            found.append(simulate(profile, plan, schedule, minibatches))
    return found


@draws(60)
@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 14), st.integers(0, 10**9))
def test_waves_give_the_same_figures(name: str, positions: int, minibatches: int, seed: int) -> None:
    random = Random(seed)
    stages = positions * (2 if name in CHUNKED else 1)
    partition = tuple(random.choice((1, 1, 2)) for _ in range(stages))
    replicas = [random.choice((1, 1, 2, 3)) for _ in range(positions)]
    if name in CHUNKED:
        replicas = replicas[:1] * positions
    policies = tuple(random.choice(("keep", "recompute")) for _ in range(sum(partition)))
    interval = random.choice((None, 3)) if name in ("pipedream", "vpipe") else None
    plan = Plan(partition, policies, name, tuple(replicas), update_interval=interval)
    waves, events = both_ways(random_profile(sum(partition), random), plan, name, minibatches)
    assert waves == events


def test_stages_that_are_read_by_others_than_the_next() -> None:
    """One action then makes several messages, on one line or on several."""
    from dataclasses import replace

    schedule = replace(build("1f1b", 4, 6), edges=frozenset({(0, 1), (0, 2), (0, 3), (1, 2), (2, 3)}))
    profile = random_profile(4, Random(5))
    waves, events = both_ways(profile, Plan((1,) * 4, ("keep",) * 4), schedule, None)
    assert waves == events


def test_bytes_that_no_word_holds() -> None:
    block = BlockCost("b", 1.0, 1.0, 1.0, 0.0, 10**18, 10**18, 10**18)
    profile = Profile((block,) * 3, DeviceCost(10**9, 1.0, 1.0), LinkCost(1e18, 0.0), 1)
    waves, events = both_ways(profile, Plan((1,) * 3, ("keep",) * 3), "gpipe", 40)
    assert waves == events
    assert waves.ranks[0].memory.activations == 40 * 10**18


def test_what_cannot_run_is_told_as_ever() -> None:
    from vpipe.schedule import Action

    def by_hand(*programs: str) -> Schedule:
        actions = [[Action.parse(text) for text in program.split()] for program in programs]
        return Schedule("by hand", ((0,), (1,)), 2, 2, True, listed(actions), lazy=False)

    profile, plan = random_profile(2, Random(1)), Plan((1, 1), ("keep",) * 2)
    with patch.object(simulation, "MANY_RANKS", 1):
        with pytest.raises(Deadlock, match="rank 0 waits in 0B1 for 0F1"):
            simulate(profile, plan, by_hand("0F0 0B1 0F1 0B0 0STEP1", "1F0 1B0 1F1 1B1 1STEP1"))
        with pytest.raises(Deadlock, match="rank 1 waits in 1STEP1 for 1 more backward"):
            simulate(profile, plan, by_hand("0F0 0F1 0B0 0B1 0STEP1", "1F0 1F1 1B0 1STEP1 1B1"))


@pytest.mark.parametrize("name", NAMES)
def test_64_stages_with_256_minibatches_are_simulated_in_waves(name: str) -> None:
    """Their number is about the length of a program, not that of all programs together.

    `benchmarks/speed.py` measures that this takes less than a second.
    """
    block = BlockCost("b", 1.0, 1.1, 0.9, 0.1, 10, 4, 100, version=0.1)
    profile = Profile((block,) * 64, DeviceCost(10**9, 1.0, 1.0), LinkCost(100.0, 0.01), 1)
    plan = Plan((1,) * 64, ("keep",) * 64)
    with patch.object(
        waves.np, "flatnonzero", wraps=np.flatnonzero
    ) as looked:  # in each wave, for who can run
        found = simulate(profile, plan, name, 256)
    ranks = 32 if name in CHUNKED else 64
    schedule = build(name, ranks, 256)
    longest = max(len(list(schedule.program(rank))) for rank in range(ranks))
    assert len(found.ranks) == ranks
    assert longest < looked.call_count <= longest + 5 * 64  # and the ways down the pipeline and back
