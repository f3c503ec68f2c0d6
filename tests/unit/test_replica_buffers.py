"""Batch statistics of replicas: one value for all of them whenever the model is looked at as a whole."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import models
from tests.checkpoints import check_resumes, steps, tensors
from tests.examples import varied
from vpipe import Pipeline
from vpipe.pipeline.threads import run_ranks
from vpipe.weights import optimizer_factory

pytestmark = pytest.mark.usefixtures("capture_once")

OPTIONS: dict[str, Any] = {"schedule": "1f1b", "minibatches": 3, "replicas": (1, 2)}


@pytest.fixture(scope="module")
def with_statistics() -> models.Example:
    _, batch, loss_fn = models.sequential()
    model = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5))
    return model, batch, loss_fn


def test_evaluating_and_saving_use_the_replicas_mean(with_statistics: models.Example) -> None:
    model, batch, loss_fn = with_statistics

    def work(world: Any) -> tuple[Any, Any, float, Any]:
        with Pipeline(
            model, batch, optimizer=optimizer_factory("sgd", 0.1), loss_fn=loss_fn, world=world, **OPTIONS
        ) as pipe:
            for _ in pipe.train(varied(batch, 6)):
                pass
            before = {n: t.clone() for n, t in pipe.state_dict().items() if n.startswith("1.")}
            loss = pipe.evaluate(varied(batch, 3))
            after = {n: t.clone() for n, t in pipe.state_dict().items() if n.startswith("1.")}
            state = pipe.full_state_dict()
            return before, after, loss, state

    (_, _, loss, state), first, second = run_ranks(3, work)  # the batch norm is in the second stage
    assert not torch.equal(first[0]["1.running_mean"], second[0]["1.running_mean"])
    for name in ("1.running_mean", "1.running_var"):
        mean = (first[0][name].double() + second[0][name].double()) / 2
        torch.testing.assert_close(first[1][name], mean.float())
        assert torch.equal(first[1][name], second[1][name])
        assert torch.equal(state[name], first[1][name])
    assert first[1]["1.num_batches_tracked"] == max(
        side[0]["1.num_batches_tracked"] for side in (first, second)
    )
    assert first[2] == second[2] == loss
    # The plain model with these weights and statistics has the same loss on all batches.
    model.load_state_dict(state)
    model.eval()
    with torch.no_grad():
        plain = sum(loss_fn(model(x), y).item() for x, y in varied(batch, 3)) / 3
    model.train()
    assert loss == pytest.approx(plain, rel=1e-5)


def test_a_resumed_run_has_the_same_statistics(with_statistics: models.Example, tmp_path: Path) -> None:
    check_resumes(with_statistics, 3, tmp_path, **OPTIONS)
    middle, end = (tensors(path)["model.1.running_mean"] for path in steps(tmp_path / "whole"))
    assert not torch.equal(middle, end)
