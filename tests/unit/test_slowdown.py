"""What stale weights cost in samples: delays of schedules, factors between measured ones, and plans that weigh them."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.drawing import draws
from tests.unit.test_plan_auto import task_of
from tests.unit.test_plan_optimal import MINIBATCHES, problems
from vpipe.cost import (
    BlockCost,
    DeviceCost,
    LinkCost,
    Profile,
    Slowdown,
    StaleTraining,
    read_slowdowns,
    sample_factor,
    write_convergence,
)
from vpipe.cost.convergence import MEASURED
from vpipe.errors import ConfigError, VPipeError
from vpipe.plan import plan
from vpipe.plan.one_schedule import plan_schedule
from vpipe.plan.planner import kinds_of
from vpipe.plan.report import about_loss, describe
from vpipe.plan.result import stale_factor
from vpipe.schedule import kind_of
from vpipe.schedule.facts import mean_delay

OWN = (Slowdown("muon", True, 1.0, 2.0), Slowdown("muon", True, 3.0, 8.0))


@pytest.mark.parametrize(("stages", "interval"), [(2, 1), (4, 1), (8, 1), (4, 4), (4, 8), (8, 32)])
def test_the_mean_delay_of_a_pipeline(stages: int, interval: int) -> None:
    """P - 1 - s minibatches are in flight at an update of stage s; each of them is one update late for each."""
    schedule = kind_of("vpipe").build(stages, None, update_interval=interval)
    assert mean_delay(schedule) == pytest.approx((stages - 1) / 2 / interval)
    assert mean_delay(kind_of("zb-v").build(stages, 8)) == 0


def test_factors_lie_on_lines() -> None:
    assert sample_factor(0.0, "muon", True, OWN) == 1
    assert sample_factor(0.5, "muon", True, OWN) == 1.5
    assert sample_factor(2.0, "muon", True, OWN) == 5
    assert sample_factor(4.0, "muon", True, OWN) == 11
    assert sample_factor(2.0, "adam", True, OWN) == sample_factor(2.0, "adamw", True)  # not among one's own
    assert sample_factor(2.0, "lion") == sample_factor(2.0, "adamw")  # nobody has measured it
    noise = (*OWN, Slowdown("muon", True, 0.5, 0.9), Slowdown("muon", True, 2.0, 1.5))
    assert sample_factor(0.5, "muon", True, noise) == 1
    assert sample_factor(2.0, "muon", True, noise) == 2  # no less than after a shorter delay


def test_the_table_is_plausible() -> None:
    for one in MEASURED:
        assert one.factor >= 1
        assert one.source
        assert sample_factor(one.delay, one.optimizer, one.predict) >= one.factor


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw", "nadamw", "lamb"])
def test_what_is_known_to_fail_is_warned_of(optimizer: str) -> None:
    schedule = kind_of("vpipe").build(4, None)
    factor = sample_factor(1.5, optimizer)
    said = StaleTraining(optimizer, predict=False).warning(schedule) or ""
    assert said.startswith(
        f"gradients are up to 3 updates old: {optimizer} needs about {factor:.1f} times as many"
    )
    muon = sample_factor(1.5, "muon", predict=True)
    assert f"optimizer muon with staleness [predict] needs {muon:.1f} times as many" in said
    assert (
        StaleTraining(optimizer, predict=False).warning(kind_of("2bw").build(4, None, update_interval=64))
        is None
    )
    assert sample_factor(1.5, "lamb", predict=True) == sample_factor(1.5, "lamb")  # not measured apart


def test_a_file_of_slowdowns(tmp_path: Path) -> None:
    path = tmp_path / "converge.json"
    write_convergence([{"label": "vpipe", "loss": 1.5}], OWN, path)
    assert read_slowdowns(path) == OWN
    write_convergence([], [], path)
    with pytest.raises(ConfigError, match="slowdowns is empty: compare a synchronous schedule"):
        read_slowdowns(path)
    path.write_text('{"slowdowns": [{"optimizer": "muon", "predict": true, "delay": -1, "factor": 1}]}')
    with pytest.raises(ConfigError, match=r"slowdowns, entry 0: delay is -1: expected updates, 0 or more"):
        read_slowdowns(path)


@draws(2)
@given(problems(), st.sampled_from([StaleTraining(measured=OWN), StaleTraining("adamw", predict=False)]))
def test_auto_takes_the_least_time_to_loss(
    problem: tuple[Profile, int, int], training: StaleTraining
) -> None:
    profile, ranks, cap = problem
    least, fastest = inf, inf
    for kind in kinds_of("auto"):
        found = plan_schedule(task_of(profile, ranks, cap, kind.name, MINIBATCHES))
        if found is not None:
            least = min(least, found.seconds * stale_factor(found, training))
            fastest = min(fastest, found.seconds)
    try:
        result = plan(profile, ranks, cap, "auto", MINIBATCHES, training=training)
    except VPipeError:
        assert least == inf
        return
    assert result.seconds_to_loss == pytest.approx(least, rel=1e-8, abs=1e-12)
    most = result if result.faster is None else result.faster
    assert most.seconds == pytest.approx(fastest, rel=1e-8, abs=1e-12)


def test_a_plan_says_why_it_is_synchronous() -> None:
    block = BlockCost("b", 1.0, 1.0, 1.0, 0.0, 1, 1, 500)  # the link is too slow for replicas
    profile = Profile((block,) * 4, DeviceCost(100_000, 1e9, 1e9), LinkCost(10.0, 0.0), 1)
    slow = Slowdown("muon", True, 0.1, 100.0)
    result = plan(profile, 4, schedule="auto", minibatches=1, training=StaleTraining(measured=(slow,)))
    assert result.synchronous
    assert result.faster is not None
    assert not result.faster.synchronous
    line = about_loss(result) or ""
    assert line.startswith(f"synchronous {result.schedule} with ")
    assert (
        f"before {result.faster.schedule}, which has {result.faster.samples_per_second:.4g} samples/s" in line
    )
    assert describe(result)["faster"]["sample_factor"] == result.faster.sample_factor > 2
    quick = plan(profile, 4, schedule="auto", minibatches=1, training=None)
    assert quick.schedule == result.faster.schedule
    assert about_loss(quick) is None
    usual = plan(profile, 4, schedule="auto", minibatches=1)
    assert usual.sample_factor > 1
    assert f"need {usual.sample_factor:.2f} times as many" in (about_loss(usual) or "")
