"""Remedies for stale weights: predicted versions and a synchronous beginning, against the plain formulas."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vpipe
from tests import models
from vpipe.config.arguments import build_schedule, make_optimizer_factory
from vpipe.config.file import read_config
from vpipe.cost import DeviceCost, LinkCost
from vpipe.errors import VPipeError
from vpipe.pipeline.threads import run_ranks
from vpipe.profile.model import MeasuredModel
from vpipe.schedule.staleness import Staleness, read_staleness
from vpipe.train.description import about_staleness
from vpipe.weights import NamedParameters, optimizer_factory
from vpipe.weights.named_optimizers import is_hidden_matrix
from vpipe.weights.prediction import write_predicted

pytestmark = pytest.mark.usefixtures("capture_once")
MODEL, BATCH, LOSS = models.sequential(6, dropout=0.1)
FLOAT = copy.deepcopy(MODEL).float()
BOTH = ["predict", {"async_after": 2}]
TIED, TIED_BATCH, TIED_LOSS = models.bert(2)


def minibatch(number: int) -> Any:
    """A rolled batch for each minibatch: equal ones would hide stale weights."""
    return tuple(field.roll(number, 0) for field in BATCH)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "nadamw", "muon", "lamb"])
def test_predicted_weights_follow_the_formula(optimizer: str) -> None:
    result = vpipe.verify(
        MODEL,
        minibatch,
        loss_fn=LOSS,
        ranks=3,
        schedule="pipedream",
        staleness=["predict"],
        updates=8,
        optimizer=optimizer_factory(optimizer, 0.01, 0.01),
    )
    assert result.ok, result.differences


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_large_parameters_are_predicted_alone(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vpipe.weights.prediction.LARGE", 2)
    test_predicted_weights_follow_the_formula(optimizer)


@pytest.mark.parametrize("large", [2, 1000])
def test_a_rate_of_0_predicts_the_weights_themselves(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vpipe.weights.prediction.LARGE", large)
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(4))]
    optimizer = torch.optim.AdamW(parameters, 0.1)
    for parameter in parameters[:2]:  # the last one has no gradient, and so no moments
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.0
    targets = {parameter: torch.empty_like(parameter) for parameter in parameters}
    write_predicted(optimizer, 3, targets)
    assert all(torch.equal(target, parameter) for parameter, target in targets.items())


@pytest.mark.parametrize("remedies", [[{"async_after": 2}], BOTH])
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "vpipe"},
        {"schedule": "2bw"},
        {"schedule": "pipedream", "update_interval": 2},
        {"schedule": "pipedream", "replicas": [1, 2]},
        {"schedule": "1f1b"},
    ],
    ids=str,
)
def test_every_schedule_gives_its_own_delays(options: dict[str, Any], remedies: list[Any]) -> None:
    result = vpipe.verify(
        MODEL, minibatch, loss_fn=LOSS, ranks=3, staleness=remedies, updates=6, clip_norm=1.0, **options
    )
    assert result.ok, result.differences


def tied_minibatch(number: int) -> dict[str, Tensor]:
    return {name: field.roll(number, 0) for name, field in TIED_BATCH.items()}


@pytest.mark.parametrize("schedule", ["pipedream", "2bw"])
def test_tied_weights_are_predicted_for_each_holder(schedule: str) -> None:
    result = vpipe.verify(
        TIED, tied_minibatch, loss_fn=TIED_LOSS, ranks=2, schedule=schedule, staleness=BOTH, updates=6
    )
    assert result.ok, result.differences


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "pipedream", "staleness": ["split_tied"]},
        {"schedule": "pipedream", "staleness": ["split_tied", *BOTH], "clip_norm": 0.5},
        {"schedule": "2bw", "staleness": ["split_tied", *BOTH]},
        {"schedule": "vpipe", "staleness": ["split_tied", "predict"], "replicas": [2, 1]},
        {"schedule": "pipedream", "staleness": ["split_tied"], "replicas": [1, 2], "update_interval": 2},
        {"schedule": "1f1b", "staleness": ["split_tied"]},
    ],
    ids=str,
)
def test_split_tied_gradients_follow_the_formula(options: dict[str, Any]) -> None:
    result = vpipe.verify(TIED, tied_minibatch, loss_fn=TIED_LOSS, ranks=3, updates=9, **options)
    assert result.ok, result.differences


def test_a_late_part_of_a_tied_gradient_is_kept_over_a_drained_pipeline(tmp_path: Path) -> None:
    """What is saved goes on to the bit; one rank, where nothing is tied, adds the late part to its first gradient."""
    rate, name = 0.1, "bert.embeddings.word_embeddings.weight"
    alone: dict[str, Any] = {"schedule": "1f1b", "minibatches": 1}
    together: dict[str, Any] = {"schedule": "pipedream", "staleness": ["split_tied"]}

    def run(world: Any, options: dict[str, Any], resumed: bool, end: int) -> Any:
        optimizer = partial(torch.optim.SGD, lr=rate)
        with vpipe.Pipeline(TIED, TIED_BATCH, optimizer=optimizer, world=world, **options) as pipe:
            if resumed:
                pipe.load(tmp_path, data=False)
            losses, before = [], pipe.full_state_dict()
            held = next(iter(pipe.runtime.stages.values())).optimizer
            late = held.optimizer_state()[0].get(f"{name}.late_gradient")
            for update, loss in pipe.train(map(tied_minibatch, range(pipe.updates, end))):
                losses.append(loss)
                if not resumed and update == 3:
                    pipe.save(tmp_path)
            return losses, before, pipe.full_state_dict(), late

    losses, _, weights, _ = run_ranks(3, lambda world: run(world, together, False, 12))[0]
    later, before, again, late = run_ranks(3, lambda world: run(world, together, True, 12))[0]
    assert late is not None
    assert later == losses[-len(later) :]
    assert 2 <= len(later) < len(losses)
    assert all(torch.equal(weights[key], again[key]) for key in weights)
    saved = 12 - len(later)
    _, _, after, _ = run_ranks(1, lambda world: run(world, alone, True, saved + 1))[0]
    plain = copy.deepcopy(TIED)
    plain.load_state_dict(before)
    plain(**tied_minibatch(saved)).loss.backward()
    expected = before[name] - rate * (plain.get_parameter(name).grad + late)
    assert torch.allclose(after[name], expected, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(after[name], expected + rate * late, rtol=1e-4, atol=1e-6)


def trained(world: Any, folder: Path | None, optimizer: str, precision: str, resumed: bool) -> Any:
    with vpipe.Pipeline(
        FLOAT,
        tuple(cast(field) for field in BATCH),
        loss_fn=LOSS,
        schedule="pipedream",
        staleness=["predict", {"async_after": 1}],
        optimizer=optimizer_factory(optimizer, 0.01),
        precision=precision,
        world=world,
    ) as pipe:
        data = [tuple(cast(field) for field in minibatch(number)) for number in range(16)]
        if resumed:
            pipe.load(folder, data=False)
        losses = []
        for update, loss in pipe.train(data[pipe.updates :]):
            losses.append(loss)
            if folder is not None and not resumed and update == 3:
                pipe.save(folder)
        return losses, pipe.full_state_dict(), pipe.evaluate(data[:2])


def cast(field: Tensor) -> Tensor:
    return field.float() if field.is_floating_point() else field


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resumed_to_the_bit_and_evaluated_without_prediction(
    tmp_path: Path, optimizer: str, precision: str
) -> None:
    arguments = (tmp_path, optimizer, precision)
    losses, weights, evaluated = run_ranks(2, lambda world: trained(world, *arguments, resumed=False))[0]
    later, again, _ = run_ranks(2, lambda world: trained(world, *arguments, resumed=True))[0]
    assert later == losses[-len(later) :]
    assert 2 <= len(later) < len(losses)
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    if precision == "fp32":
        plain = copy.deepcopy(FLOAT).eval()
        plain.load_state_dict(weights)
        batches = [tuple(cast(field) for field in minibatch(number)) for number in range(2)]
        expected = sum(LOSS(plain(inputs), target).item() for inputs, target in batches) / 2
        assert evaluated == pytest.approx(expected, rel=1e-5)


def test_remedies_are_read() -> None:
    assert read_staleness([]) == Staleness(False, 0)
    assert read_staleness(BOTH) == Staleness(True, 2)
    assert read_staleness("predict") == Staleness(True, 0)


@pytest.mark.parametrize(
    ("remedies", "message"),
    [
        (["predicted"], "unknown remedy 'predicted': did you mean 'predict'"),
        (["predict", "predict"], "has predict twice"),
        (["async_after"], "async_after: None: give a number of updates"),
        ([{"async_after": -1}], "async_after: -1: give a number"),
        ([{"async_after": True}], "async_after: True: give a number"),
        ([{"predict": 3}], "predict: 3: it takes no number"),
        ([{"split_tied": 3}], "split_tied: 3: it takes no number"),
        ([3], "unknown remedy 3"),
    ],
)
def test_mistakes(remedies: list[Any], message: str) -> None:
    with pytest.raises(VPipeError, match=message):
        read_staleness(remedies)


def test_settings_of_optimizers() -> None:
    parameters = [nn.Parameter(torch.zeros(2, 2))]
    made: Any = optimizer_factory("adamw", 0.1, betas=[0.8, 0.9], eps=None)(parameters)  # type: ignore[arg-type]
    assert tuple(made.param_groups[0]["betas"]) == (0.8, 0.9)
    with pytest.raises(
        VPipeError, match=r"momentum is 0.5, but optimizer 'adamw' has no momentum: .* sgd, muon"
    ):
        optimizer_factory("adamw", 0.1, momentum=0.5)


@pytest.mark.parametrize(
    ("name", "shape", "hidden"),
    [
        ("transformer.h.0.attn.c_attn.weight", (4, 12), True),
        ("bert.encoder.layer.0.output.dense.weight", (4, 4), True),
        ("bert.encoder.layer.0.output.dense.bias", (4,), False),
        ("transformer.wte.weight", (9, 4), False),
        ("bert.embeddings.word_embeddings.weight", (9, 4), False),
        ("lm_head.weight", (9, 4), False),
        ("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", (32, 2), False),
        ("conv.weight", (4, 4, 3, 3), False),
    ],
)
def test_muon_takes_the_matrices_between_embedding_and_head(
    name: str, shape: tuple[int, ...], hidden: bool
) -> None:
    assert is_hidden_matrix(name, nn.Parameter(torch.zeros(shape))) is hidden


@pytest.mark.parametrize("shape", [(4, 4), (64, 256), (1024, 8), (2048, 16)])
def test_updates_of_small_matrices_have_the_norm_of_large_ones(shape: tuple[int, int]) -> None:
    """A root mean square of 0.2 from a side of 1024 on; for smaller ones the spectral norm that such a side has."""
    weight = nn.Parameter(torch.zeros(shape))
    (muon,) = optimizer_factory("muon", 0.01)(NamedParameters([("hidden.weight", weight)]))
    weight.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    muon.step()
    largest = torch.linalg.matrix_norm(weight.detach(), 2).item()
    assert largest == pytest.approx(
        0.01 * 0.2 * max(*shape, 1024) ** 0.5, rel=0.35
    )  # Muon's iteration is coarse
    if max(shape) >= 1024:
        assert weight.square().mean().sqrt().item() == pytest.approx(0.01 * 0.2, rel=0.35)


@pytest.mark.parametrize(
    ("keys", "optimizer", "predict", "line"),
    [
        (
            "schedule: vpipe",
            "muon",
            True,
            "gradients are up to 1 updates old: optimizer muon with predicted weights",
        ),
        ("sync_mode: asp", "muon", True, "which bears it best"),
        ("schedule: vpipe\nstaleness: []", "muon", False, "optimizer muon is used"),
        (
            "schedule: vpipe\noptimizer: adamw",
            "adamw",
            False,
            "WARNING: gradients are up to 1 updates old: adamw needs about 1.5 times as many samples",
        ),
        ("schedule: vpipe\noptimizer: adam", "adam", False, "WARNING: gradients are up to 1"),
        ("schedule: vpipe\noptimizer: nadamw", "nadamw", False, None),  # on 2 stages it loses little
        ("schedule: vpipe\noptimizer: sgd", "sgd", False, "WARNING: gradients are up to 1"),
        ("macrobatch: true\nupdate_interval: 8\noptimizer: adamw", "adamw", False, None),
        ("schedule: 1f1b", "adamw", False, None),
    ],
)
def test_what_a_run_has_if_nothing_is_chosen(
    tmp_path: Path, keys: str, optimizer: str, predict: bool, line: str | None
) -> None:
    (tmp_path / "run.yml").write_text(f"{keys}\nstages: 2\n")
    config = read_config(tmp_path / "run.yml")
    assert (config.chosen_optimizer, config.remedies.predict) == (optimizer, predict)
    said = about_staleness(config, build_schedule(config))
    assert said is None if line is None else line in str(said)


@pytest.mark.parametrize(
    ("keys", "betas"),
    [
        ("schedule: vpipe", (0.97, 0.99)),
        ("schedule: vpipe\nupdate_interval: 3", (0.9, 0.95)),
        ("schedule: 2bw\noptimizer: muon", (0.9, 0.95)),
        ("schedule: vpipe\nbetas: [0.8, 0.9]", (0.8, 0.9)),
        ("schedule: 1f1b\noptimizer: muon", (0.9, 0.95)),
        ("schedule: vpipe\noptimizer: adamw", (0.9, 0.999)),
    ],
)
def test_moments_beside_muon_are_slower_with_old_weights(
    tmp_path: Path, keys: str, betas: tuple[float, float]
) -> None:
    (tmp_path / "run.yml").write_text(f"{keys}\nstages: 3\n")
    factory = make_optimizer_factory(read_config(tmp_path / "run.yml"))
    made: Any = factory(NamedParameters([("bias", nn.Parameter(torch.zeros(2)))]))
    (optimizer,) = made if isinstance(made, list) else [made]
    assert tuple(optimizer.param_groups[0]["betas"]) == betas


def test_a_profile_counts_what_prediction_takes() -> None:
    def ratio(optimizer: str, predict: bool) -> float:
        measured = MeasuredModel(
            FLOAT,
            tuple(cast(field) for field in BATCH),
            LOSS,
            optimizer=optimizer_factory(optimizer, 0.01),
            predict=predict,
        )
        return measured.measure(0.1, DeviceCost(2**30, 1e9, 1e9), LinkCost(1e9, 1e-6)).optimizer_ratio

    assert ratio("sgd", True) - ratio("sgd", False) == pytest.approx(1, abs=0.01)  # masters of their own
