"""Checkpoints: resuming equals never having stopped, under any layout."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn

from tests import models
from tests.checkpoints import STOP, SYNCHRONOUS, UPDATES, bert, check_resumes, run, steps, tensors
from tests.examples import example
from vpipe import Pipeline, checkpoint
from vpipe.weights.policies import learning_rate_policy

pytestmark = pytest.mark.usefixtures("capture_once")


def test_synchronous_with_dropout_clipping_and_tied_weights(tmp_path: Path) -> None:
    check_resumes(bert(), 2, tmp_path, clip_norm=0.5, **SYNCHRONOUS)


@pytest.mark.parametrize("optimizer", ["sgd", "lamb"])
def test_asynchronous(tmp_path: Path, optimizer: str) -> None:
    saved = check_resumes(
        example("sequential", torch.float32, dropout=0.1),
        3,
        tmp_path,
        optimizer=optimizer,
        schedule="pipedream",
        lr_scheduler=learning_rate_policy("cosine", 2, UPDATES),
    )
    record = saved.state["optimizers"][0]
    assert record["scheduler"]["last_epoch"] == saved.updates
    assert optimizer == "sgd" or record["groups"][0]["numbers"]["step"] == saved.updates


@pytest.mark.parametrize("options", [{"schedule": "pipedream"}, {"schedule": "2bw", "update_interval": 3}])
def test_tied_weights_whose_late_holder_lags(tmp_path: Path, options: dict[str, Any]) -> None:
    check_resumes(example("gpt2", layers=1, dropout=0.1), 2, tmp_path, clip_norm=0.5, **options)


def test_several_stages_on_a_rank(tmp_path: Path) -> None:
    check_resumes(bert(), 2, tmp_path, schedule="zb-v", minibatches=3)


def test_replicas(tmp_path: Path) -> None:
    options: dict[str, Any] = {"schedule": "pipedream", "replicas": (2, 1)}
    check_resumes(example("gpt2", layers=1, dropout=0.1), 3, tmp_path, **options)


@pytest.mark.parametrize("options", [{"schedule": "pipedream"}, SYNCHRONOUS])
def test_float16_with_a_loss_scale_that_overflows(tmp_path: Path, options: dict[str, Any]) -> None:
    def start_too_high(pipe: Pipeline) -> None:
        scale = pipe.runtime.updates.loss_scale
        scale.value, scale.growth_interval = 2.0**17, 4

    sequential = example("sequential", torch.float32, layers=2, dropout=0.1)
    saved = check_resumes(sequential, 2, tmp_path, precision="fp16", prepare=start_too_high, **options)
    scale = saved.state["loss_scale"]
    assert scale["enabled"]
    assert (scale["value"], scale["good_updates"]) != (2.0**17, 0)
    weights = tensors(steps(tmp_path / "whole")[0])
    assert {t.dtype for n, t in weights.items() if n.startswith("model.")} == {torch.float32}


def test_bfloat16(tmp_path: Path) -> None:
    sequential = example("sequential", torch.float32, layers=2, dropout=0.1)
    check_resumes(sequential, 2, tmp_path, precision="bf16", **SYNCHRONOUS)


def test_buffers_that_training_changes(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5))
    _, batch, loss_fn = models.sequential()
    check_resumes((model, batch, loss_fn), 2, tmp_path, **SYNCHRONOUS)
    middle, end = (tensors(path)["model.1.running_mean"] for path in steps(tmp_path / "whole"))
    assert not torch.equal(middle, end)


OTHER_LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, SYNCHRONOUS),
    (3, SYNCHRONOUS),
    (2, {**SYNCHRONOUS, "partition": (1, 4)}),
    (2, {"schedule": "gpipe", "minibatches": 3}),
    (2, {"schedule": "zb-v", "minibatches": 3}),
    (3, {**SYNCHRONOUS, "replicas": (2, 1)}),
]


Whole: TypeAlias = "Callable[..., tuple[dict[int, float], list[Path]]]"


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Losses and checkpoints of a run that does not stop, made for the first of the tests that compare with it."""
    made: dict[int, tuple[dict[int, float], list[Path]]] = {}

    def losses_and_steps(given: models.Example, ranks: int, **options: Any) -> Any:
        if id(given) not in made:
            directory = tmp_path_factory.mktemp("whole")
            made[id(given)] = run(given, ranks, directory, **options), steps(directory)
        return made[id(given)]

    return losses_and_steps


POLICY = learning_rate_policy("polynomial", 2, UPDATES)


@pytest.mark.parametrize(("ranks", "options"), OTHER_LAYOUTS)
def test_another_layout_goes_on_with_the_same_training(
    tmp_path: Path, whole_run: Whole, ranks: int, options: dict[str, Any]
) -> None:
    whole, (middle, end) = whole_run(bert(), 2, lr_scheduler=POLICY, **SYNCHRONOUS)
    second = run(bert(), ranks, tmp_path / "second", resume=middle, lr_scheduler=POLICY, **options)
    assert second == pytest.approx({u: loss for u, loss in whole.items() if u >= STOP}, rel=1e-9)
    expected, got = tensors(end), tensors(steps(tmp_path / "second")[0])
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-6, atol=1e-9, msg=name)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_another_partition_of_a_chain_is_equal_to_the_bit(
    tmp_path: Path, whole_run: Whole, ranks: int
) -> None:
    sequential = example("sequential", dropout=0.1)
    whole, (middle, end) = whole_run(sequential, 3, **SYNCHRONOUS)
    second = run(sequential, ranks, tmp_path / "second", resume=middle, **SYNCHRONOUS)
    assert second == {u: loss for u, loss in whole.items() if u >= STOP}
    expected, got = tensors(end), tensors(steps(tmp_path / "second")[0])
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("options", [{"schedule": "pipedream"}, {**SYNCHRONOUS, "replicas": (1, 2)}])
def test_loading_into_another_layout_and_saving_again_changes_nothing(
    tmp_path: Path, whole_run: Whole, options: dict[str, Any]
) -> None:
    gpt2 = example("gpt2", layers=1, dropout=0.1)
    _, (*_, end) = whole_run(gpt2, 2, optimizer="lamb", schedule="2bw", update_interval=2)
    run(gpt2, 3, tmp_path / "again", resume=end, optimizer="lamb", updates=0, **options)
    again = steps(tmp_path / "again")[0]
    expected, got = tensors(end), tensors(again)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    assert numbers(again) == numbers(end)


def numbers(path: Path) -> dict[str, Any]:
    records = checkpoint.read_manifest(path).state["optimizers"]
    return {name: g["numbers"] for r in records for g in r["groups"] for name in g["parameters"]}


def test_a_run_in_another_precision_keeps_its_own_scale(tmp_path: Path) -> None:
    sequential = example("sequential", torch.float32, layers=2, dropout=0.1)
    run(sequential, 1, tmp_path / "half", precision="fp16", **SYNCHRONOUS)
    end = steps(tmp_path / "half")[-1]
    run(sequential, 1, tmp_path / "full", resume=end, updates=0, **SYNCHRONOUS)
    saved = checkpoint.read_manifest(steps(tmp_path / "full")[0])
    assert saved.state["loss_scale"] == {"enabled": False, "value": 1.0, "good_updates": 0}
