"""The link to the host that several ranks share: closed formulas, in the simulator and in the planner."""

from __future__ import annotations

import sys
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from vpipe.config import RunConfig
from vpipe.cost import BlockCost, DeviceCost, LinkCost, Plan, Profile, read_profile, write_profile
from vpipe.errors import ConfigError
from vpipe.plan import plan
from vpipe.simulate import simulate
from vpipe.train import profiling

HOST = 10.0
"""Bytes a second, out as well as back: a block of 15 bytes swaps in 3 seconds."""
BLOCK = BlockCost("block", 1.0, 1.0, 1.0, 0.0, kept_bytes=15, boundary_bytes=1, parameter_bytes=0)


def profile(*kept: int, shared_by: int = 1) -> Profile:
    blocks = tuple(replace(BLOCK, kept_bytes=size) for size in kept)
    return Profile(blocks, DeviceCost(10**6, HOST, HOST, shared_by=shared_by), LinkCost(inf, 0.0), 1)


def period(costs: Profile, policies: str, replicas: tuple[int, ...] = ()) -> float:
    """Seconds of a minibatch, one block a stage (K, S). The last stages have nothing to hide copies behind."""
    stages = len(costs.blocks)
    chosen = tuple({"K": "keep", "S": "swap"}[letter] for letter in policies)
    result = simulate(costs, Plan((1,) * stages, chosen, "pipedream", replicas), "pipedream", 120)
    return costs.batch_size / result.samples_per_second


@pytest.mark.parametrize("together", [1, 2, 4])
def test_ranks_that_swap_all_the_time_have_equal_parts(together: int) -> None:
    costs = profile(*[30] * 8, shared_by=together)
    assert period(costs, "SSSSKKKK") == pytest.approx(together * 2 * 30 / HOST)


def test_a_rank_that_swaps_alone_has_all() -> None:
    assert period(profile(*[30] * 8, shared_by=8), "KSKKKKKK") == pytest.approx(2 * 30 / HOST)
    assert period(profile(*[30] * 8, shared_by=2), "KSSKKKKK") == pytest.approx(2 * 30 / HOST)


def test_the_link_carries_the_sum() -> None:
    costs = profile(30, 5, 10, 5, 5, 5, 5, 5, shared_by=8)
    assert period(costs, "SSSKKKKK") == pytest.approx(2 * (30 + 5 + 10) / HOST)


def test_sharing_is_free_while_the_link_keeps_up() -> None:
    assert period(profile(*[3] * 8, shared_by=8), "SSSSKKKK") == pytest.approx(3.0)


def test_replicas_copy_in_their_turns() -> None:
    """Two ranks of one stage copy 30 bytes each for every second minibatch, beside the next stage's 10."""
    costs = profile(30, 10, 5, 5, 5, 5, 5, 5, shared_by=3)
    assert period(costs, "SSKKKKKK", (2, *[1] * 7)) == pytest.approx(2 * (30 + 10) / HOST, rel=1e-3)


def test_a_plan_knows_what_the_others_swap() -> None:
    """The cap leaves room for a minibatch or two: all but the last stage have to recompute or swap."""
    alone, shared = profile(*[15] * 4), profile(*[15] * 4, shared_by=4)
    cap = 2 * 15 + 2 * (1 + 1)
    free = plan(alone, 4, cap, "pipedream")
    assert free.policies.count("swap") == 2
    assert free.seconds == pytest.approx(3.0)
    # Where the link is shared that makes it busy for 6 s: one rank that swaps, and three replicas that recompute a
    # block, are quicker.
    assert 1 / simulate(shared, free.to_plan(), minibatches=120).samples_per_second == pytest.approx(6.0)
    together = plan(shared, 4, cap, "pipedream")
    assert together.replicas == (1, 3)
    assert (together.policies.count("swap"), together.policies.count("recompute")) == (1, 1)
    assert together.seconds == pytest.approx((3 * 3 + 1) / 3)
    simulated = simulate(shared, together.to_plan(), minibatches=120)
    assert 1 / simulated.samples_per_second == pytest.approx(together.seconds)


@pytest.mark.parametrize("schedule", ["pipedream", "1f1b", "zb-v"])
def test_plan_and_simulator_agree_about_the_link(schedule: str) -> None:
    costs = profile(*[15] * 8, shared_by=4)
    result = plan(costs, 4, 60, schedule, minibatches=16)
    slowest = max(position.seconds for position in result.positions)
    simulated = simulate(costs, result.to_plan(), minibatches=400)
    assert 1 / simulated.samples_per_second >= slowest * (1 - 1e-6)


def test_the_profile_says_how_many_share(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    costs = replace(profile(15, shared_by=4), link=LinkCost(1.0, 0.0))
    write_profile(costs, path)
    assert read_profile(path).device.shared_by == 4
    path.write_text(path.read_text().replace('"shared_by": 4', '"shared_by": 0'))
    with pytest.raises(
        ConfigError, match="device: shared_by is 0: expected ranks: a whole number, 1 or more"
    ):
        read_profile(path)


@pytest.mark.parametrize(
    ("machines", "gpus", "measured"),
    [
        (["localhost:0", "localhost:1", "localhost:1", "localhost:1"], 2, [1, 1, 1]),
        (None, 1, [0, 0, 0, 0]),
        (None, 3, [0, 0]),
        (None, 4, [0]),
    ],
)
def test_a_gpu_is_measured_by_as_many_as_share_it(
    machines: list[str] | None, gpus: int, measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["vpipe.launch.mps"], "count_gpus", lambda: gpus)
    asked: list[Any] = []

    def by_ranks(config: RunConfig, *count_and_places: Any) -> Profile:
        asked.append(count_and_places)
        return profile(1)

    monkeypatch.setattr(profiling, "profile_by_ranks", by_ranks)
    assert profiling.profile_config(RunConfig(machines=machines, stages=4)) == profile(1)
    assert asked == [(len(measured), measured)]
