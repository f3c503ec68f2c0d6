"""The commands as functions: verify, profile, plan and simulate of a user's own model, and of a pipeline."""

import gc
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import vpipe
from tests.own_model import SOURCE
from vpipe.errors import VPipeError
from vpipe.pipeline.threads import run_ranks

pytestmark = pytest.mark.usefixtures("capture_once")
OWN: dict[str, Any] = {}
exec(SOURCE, OWN)
torch.manual_seed(0)
MODEL = OWN["Net"]()
BATCHES = list(vpipe.Loader(OWN["Data"](40), 4))


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, 1e-3)


def test_they_are_found_and_documented() -> None:
    assert set(vpipe.__all__) <= set(dir(vpipe))
    for name in ("verify", "profile", "plan", "simulate"):
        function = getattr(vpipe, name)
        assert callable(function)
        assert inspect.signature(function) == inspect.signature(getattr(function, name))
        assert inspect.getdoc(getattr(function, name))
    for method in (
        "save",
        "load",
        "resume",
        "verify",
        "plan",
        "predict",
        "evaluate",
        "train",
        "step_schedulers",
    ):
        assert inspect.getdoc(getattr(vpipe.Pipeline, method)), method
    assert (Path(vpipe.__file__).parent / "py.typed").is_file()


def test_packages_and_functions_live_together() -> None:
    """Whatever is imported first, and without torch where none is needed."""
    script = (
        "import sys, vpipe; from vpipe.plan import PlanResult; assert callable(vpipe.plan), callable(vpipe.simulate); "
        "import vpipe.plan as again; assert again.PlanResult is PlanResult; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_verify() -> None:
    for batch in (BATCHES[0], lambda number: BATCHES[number % 10]):
        assert vpipe.verify(MODEL, batch, loss_fn=OWN["loss"], schedule="1f1b", updates=2).ok


def test_profile_plan_and_simulate() -> None:
    measured = vpipe.profile(MODEL, BATCHES[0], loss_fn=OWN["loss"], optimizer=optimizer, seconds=0.1)
    assert len(measured.blocks) == 4
    assert measured.batch_size == 4
    found = vpipe.plan(measured, 2, memory="1GiB", schedule="1f1b", minibatches=4)
    plan = found.to_plan()
    assert sum(plan.partition) == 4
    assert vpipe.simulate(measured, plan).step_time > 0
    with pytest.raises(VPipeError, match="lots"):
        vpipe.plan(measured, 2, memory="lots")


def test_a_pipeline_verifies_and_plans_itself() -> None:
    def run(world: Any) -> tuple[Any, Any, list[float]]:
        with vpipe.Pipeline(
            MODEL,
            BATCHES[0],
            loss_fn=OWN["loss"],
            optimizer=optimizer,
            world=world,
            minibatches=2,
            clip_norm=1.0,
        ) as pipe:
            proof = pipe.verify(updates=2)
            plan = pipe.plan(memory="1GiB", minibatches=4)
            return proof, plan, [loss for _, loss in pipe.train(BATCHES)]

    (proof, plan, losses), (other, nothing, _) = run_ranks(2, run, timeout=600.0)
    assert proof.ok
    assert proof == other
    assert proof.ranks == 2
    assert plan is not None
    assert nothing is None
    assert losses[-1] > 0


def test_a_pipeline_does_not_keep_the_model() -> None:
    batch = (torch.randn(2, 4), torch.randn(2, 1))
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))

    def run(world: Any) -> None:
        nonlocal model
        pipe = vpipe.Pipeline(model, batch, loss_fn=nn.functional.mse_loss, optimizer=optimizer, world=world)
        del model
        gc.collect()
        with pipe, pytest.raises(VPipeError, match="is gone: keep a reference to it"):
            pipe.verify()

    from vpipe.graph import capture

    with pytest.MonkeyPatch.context() as patch:  # the shared captures keep their models
        patch.setattr("vpipe.pipeline.captured.capture", capture)
        run_ranks(1, run)
