"""Planned runs through the real command line: profiled, planned and trained in one go."""

import json
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.captures import capture_config, capture_unknown
from tests.end_to_end.command import vpipe, wait_until_gone
from tests.end_to_end.test_train import TINY, only_run, tiny  # noqa: F401 (a fixture)
from vpipe.cost import DeviceCost, LinkCost
from vpipe.profile import contention, model
from vpipe.system.environment import GPU_SHARE, PROFILE_NAME
from vpipe.train import launcher


def measure_briefly() -> None:
    """For the process that plans: few rounds of measurements, and no link, which a new interpreter would answer."""
    model.capture = capture_unknown
    model.MOST_ROUNDS = model.LEAST_ROUNDS
    model.measure_link = lambda place: LinkCost(1e10, 1e-5)


def test_a_run_plans_itself_and_its_plan_is_for_no_other_model(
    tiny: Callable[..., Path],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tiny(partition="auto", max_updates=3, gpu_memory="1GiB")
    monkeypatch.setenv("VPIPE_CACHE", str(folder / "kept"))
    ended = vpipe("train", "run.yml", cwd=folder, prepare=measure_briefly)
    assert ended.code == 0, ended.said
    run = only_run(folder)
    plan = json.loads((run / "plan.json").read_text())
    assert sum(plan["replicas"]) + plan.get("idle", 0) == len(
        TINY["machines"]
    )  # one, on a machine of one core
    assert sum(plan["partition"]) == len(plan["policies"]) == 5
    assert plan["prediction"]["samples_per_s"] > 0
    assert len(list((folder / "kept" / "profiles").iterdir())) == 1
    summary = json.loads((run / "summary.json").read_text())
    assert list(summary["phases"])[:3] == ["launch", "profile", "plan"]
    assert summary["partition"] == plan["partition"]
    # The same plan, a model with as many blocks of another width: every rank finds out, one line is said.
    tiny(partition=str(run / "plan.json"), max_updates=3, hidden_size=48)
    refused = vpipe("train", "run.yml", cwd=folder, prepare=partial(capture_config, folder / "run.yml"))
    assert refused.code == 2, refused.said
    assert "plan.json: is a plan for another model" in refused.err
    assert "Traceback" not in refused.said
    wait_until_gone(str(folder))


def leave_it_to_two_ranks() -> None:
    """As on a host whose ranks all share one GPU, for which no profile is kept."""
    launcher._left_to_ranks = lambda config: {PROFILE_NAME: "theirs.json", GPU_SHARE: "2"}
    model.capture = capture_unknown
    contention.MARGIN = 0.1
    contention.profile_shared_device.__defaults__ = (0.4,)
    contention.measure_device = lambda place, nccl: DeviceCost(2**34, 1e10, 1e10)
    contention.measure_link = lambda place: LinkCost(1e10, 1e-5)


def kill_a_rank_that_measures() -> None:
    """The second one, when it has begun."""
    leave_it_to_two_ranks()
    warm = model.MeasuredModel.warm

    def die(self: model.MeasuredModel) -> None:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        warm(self)

    model.MeasuredModel.warm = die


def test_a_rank_that_dies_while_all_measure_ends_the_run(
    tiny: Callable[..., Path],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tiny(partition="auto", max_updates=3)
    monkeypatch.setenv("VPIPE_CACHE", str(folder / "kept"))
    ended = vpipe("train", "run.yml", cwd=folder, prepare=kill_a_rank_that_measures)
    assert ended.code == 1
    assert "rank 1 failed: killed by SIGKILL" in ended.err
    assert "Traceback" not in ended.said
    assert not list((folder / "kept" / "profiles").iterdir())  # it was looked for there
    wait_until_gone(str(folder))


def test_ranks_of_one_gpu_measure_together_before_they_train(
    tiny: Callable[..., Path],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tiny(partition="auto", max_updates=3, schedule="auto")
    monkeypatch.setenv("VPIPE_CACHE", str(folder / "kept"))
    ended = vpipe("train", "run.yml", cwd=folder, prepare=leave_it_to_two_ranks)
    assert ended.code == 0, ended.said
    assert "measuring the blocks of the model, 2 ranks at once" in ended.said
    assert "run.yml: schedule auto: " in ended.said
    run = only_run(folder)
    profile = json.loads((folder / "kept" / "profiles" / "theirs.json").read_text())
    assert profile == json.loads((run / "profile.json").read_text())
    assert profile["device"]["shared_by"] == 2
    plan, summary = (json.loads((run / name).read_text()) for name in ("plan.json", "summary.json"))
    assert summary["partition"] == plan["partition"]
    assert summary["updates"] == 3
    phases = list(summary["phases"])
    assert phases[phases.index("rendezvous") :][:3] == ["rendezvous", "profile", "plan"]
    wait_until_gone(str(folder))
