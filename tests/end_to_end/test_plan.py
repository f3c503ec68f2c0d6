"""Planned runs through the real command line: profiled, planned and trained in one go."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.captures import capture_config, capture_unknown
from tests.end_to_end.command import vpipe, wait_until_gone
from tests.end_to_end.test_train import TINY, only_run, tiny  # noqa: F401 (a fixture)
from vpipe.cost import LinkCost
from vpipe.profile import model


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
    assert sum(plan["replicas"]) == len(TINY["machines"])
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
