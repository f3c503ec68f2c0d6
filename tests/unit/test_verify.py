"""The proof itself: it holds for right pipelines of every kind, and breaks, at the right place, for wrong ones."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests import models
from vpipe.config import RunConfig
from vpipe.errors import VPipeError
from vpipe.graph import capture
from vpipe.schedule import build, read_table, write_table
from vpipe.stage import Stage
from vpipe.verify import Verification, verify, verify_config
from vpipe.verify.comparison import largest_difference, rounding_alone
from vpipe.verify.reference import versions_read
from vpipe.weights import OptimizerWithWeightStashing, optimizer_factory


def adamw(parameters: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2, weight_decay=0.1)


def rolled(batch: Any) -> Callable[[int], Any]:
    """Minibatches that differ from each other."""

    def make(number: int) -> Any:
        if isinstance(batch, dict):
            return {name: tensor.roll(number, 0) for name, tensor in batch.items()}
        return type(batch)(tensor.roll(number, 0) for tensor in batch)

    return make


def check(example: models.Example, ranks: int, **options: Any) -> Verification:
    model, batch, loss_fn = example
    return verify(model, rolled(batch), ranks=ranks, optimizer=adamw, loss_fn=loss_fn, **options)


@pytest.fixture(autouse=True)
def _one_capture(capture_once: None) -> Iterator[None]:
    return


class SharedEmbedding(nn.Module):
    """Reads one weight at both ends under one name: no alias tells the two uses apart."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.VOCABULARY, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.dropout = nn.Dropout(0.2)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = hidden + self.dropout(functional.gelu(layer(hidden)))
        return functional.linear(hidden, self.embedding.weight)


def shared_embedding() -> models.Example:
    torch.manual_seed(0)
    batch = [models.token_ids(), models.token_ids(seed=2)]
    return SharedEmbedding(), batch, models.next_token_loss


class UnreadableLayer(nn.Module):
    """Draws twice and looks at its data, so that it cannot be exported."""

    def __init__(self, linear: nn.Linear | None = None) -> None:
        super().__init__()
        self.linear = linear or nn.Linear(12, 12)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = functional.dropout(
            self.linear(functional.dropout(hidden, 0.1, self.training)), 0.1, self.training
        )
        while hidden.norm() < 4:
            hidden = hidden * 2
        return hidden


def unreadable() -> models.Example:
    """The first and the last hidden layer are one."""
    torch.manual_seed(0)
    first = UnreadableLayer()
    layers = [first, *(UnreadableLayer() for _ in range(3)), UnreadableLayer(first.linear)]
    inputs = torch.randn(models.BATCH, 12)
    batch = (inputs, torch.arange(models.BATCH) % 5)
    return nn.Sequential(*layers, nn.Linear(12, 5)), batch, functional.cross_entropy


def normed() -> models.Example:
    """Running statistics belong to a stage and change with every forward."""
    torch.manual_seed(0)
    layers = [nn.Linear(12, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 12), nn.BatchNorm1d(12)]
    batch = (torch.randn(models.BATCH, 12), torch.arange(models.BATCH) % 5)
    return nn.Sequential(*layers, nn.Linear(12, 5)), batch, functional.cross_entropy


@pytest.mark.parametrize(
    ("example", "ranks", "options"),
    [
        (shared_embedding, 2, {"schedule": "zb-v", "minibatches": 3, "clip_norm": 0.1}),
        (
            lambda: models.bert(2, dropout=0.1),
            3,
            {"schedule": "pipedream", "replicas": [2, 1], "clip_norm": 0.1},
        ),
        (lambda: models.gpt2(1, dropout=0.1), 3, {"schedule": "pipedream", "recompute_ratio": 0.5}),
        (shared_embedding, 3, {"schedule": "2bw"}),
        pytest.param(lambda: models.t5(1, dropout=0.1), 3, {"schedule": "2bw"}, marks=pytest.mark.long),
        (shared_embedding, 3, {"schedule": "pipedream", "clip_norm": 0.1}),
        (shared_embedding, 3, {"schedule": "vpipe", "replicas": [1, 2], "update_interval": 3}),
        (unreadable, 3, {"schedule": "pipedream"}),
        (unreadable, 2, {"schedule": "gpipe", "minibatches": 2, "recompute_ratio": 1.0}),
        (normed, 2, {"schedule": "pipedream"}),
        (lambda: models.lstm(2, dropout=0.1), 2, {"schedule": "pipedream", "dtype": "float32"}),
    ],
    ids=lambda value: value.get("schedule") if isinstance(value, dict) else "",
)
def test_right_pipelines_pass(
    example: Callable[[], models.Example], ranks: int, options: dict[str, Any]
) -> None:
    result = check(example(), ranks, **options)
    assert result.ok, result
    assert all(difference.where for difference in result.differences.values())
    if not options.get("minibatches"):
        assert result.updates > 5, "stale weights must have been read"


def test_an_asynchronous_table_is_run_again_and_again() -> None:
    table = read_table(write_table(build("pipedream", 2, 4)), "four.csv")
    result = check(models.sequential(3, dropout=0.1), 2, schedule=table, updates=6)
    assert result.ok, result
    assert (result.schedule, result.updates, result.minibatches) == ("four.csv", 8, 8)


def test_the_model_and_the_generator_stay_as_they_are() -> None:
    model, batch, loss_fn = models.sequential(2, dropout=0.1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    assert verify(model, rolled(batch), ranks=2, optimizer=adamw, loss_fn=loss_fn, updates=1).ok
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_wrong_gradient_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right = OptimizerWithWeightStashing.step

    def wrong(self: OptimizerWithWeightStashing, *arguments: Any) -> None:
        if "6.weight" in self.names:
            self.model_parameters[self.names.index("6.weight")].grad *= 1.0001
        right(self, *arguments)

    monkeypatch.setattr(OptimizerWithWeightStashing, "step", wrong)
    result = check(models.sequential(3), 2, schedule="1f1b", minibatches=2)
    assert not result.ok
    assert result.gradients.largest == pytest.approx(1e-4, rel=0.01)
    assert result.gradients.where.startswith("6.weight (stage ")


def test_a_wrong_seed_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Stage.backward
    monkeypatch.setattr(Stage, "backward", lambda self, m, seed: right(self, m, seed * (1 + 1e-6)))
    result = check(models.sequential(3), 2, schedule="1f1b", minibatches=2)
    assert not result.ok
    assert result.gradients.largest == pytest.approx(1e-6, rel=0.01)


def test_weights_that_were_not_stashed_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputed with other weights than forward saw: the first update is right, what follows is not."""
    monkeypatch.setattr(OptimizerWithWeightStashing, "load_old_params", lambda self, minibatch: None)
    result = check(models.sequential(3), 3, schedule="pipedream", recompute_ratio=1.0)
    assert not result.ok
    assert result.gradients.largest <= result.bound < result.weights.largest


def test_a_gradient_that_never_comes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = OptimizerWithWeightStashing.step

    def forgetful(self: OptimizerWithWeightStashing, *arguments: Any) -> None:
        for name, parameter in zip(self.names, self.model_parameters, strict=True):
            parameter.grad = None if name == "0.bias" else parameter.grad
        right(self, *arguments)

    monkeypatch.setattr(OptimizerWithWeightStashing, "step", forgetful)
    result = check(models.sequential(3), 2, schedule="1f1b", minibatches=2)
    assert not result.ok
    assert result.gradients.where == "0.bias, which has no gradient in the pipeline"


def test_what_is_not_a_number_is_not_equal() -> None:
    model, (inputs, target), loss_fn = models.sequential(2)
    result = check((model, (inputs * float("nan"), target), loss_fn), 2, updates=1)
    assert not result.ok
    assert result.loss.largest == float("inf")


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("interval", [1, 2, 3])
def test_versions_of_a_chain_follow_the_closed_formula(stages: int, interval: int) -> None:
    schedule = build("pipedream", stages, None, update_interval=interval)
    read = versions_read(schedule, 12 * interval)
    ahead = {stage: stages - 1 - stage for stage in range(stages)}
    assert read == {(s, m): max(0, (m - ahead[s]) // interval) for s in ahead for m in range(12 * interval)}


def test_differences_are_relative_and_rounding_is_known() -> None:
    ones, tiny = torch.ones(3), torch.full((3,), 1e-9)
    assert largest_difference({"a": ones * 2, "b": tiny}, {"a": ones * 4, "b": tiny * 2}) == (0.5, "a")
    assert largest_difference({"b": tiny}, {"b": tiny * 2}) == (pytest.approx(1e-7), "b")
    assert rounding_alone({"a": ones, "b": tiny, "zero": ones * 0}) == {"b"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float16"}, "dtype is 'float16'"),
        ({"updates": 0}, "updates is 0"),
        ({"schedule": "1f1"}, "1f1b"),
    ],
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(VPipeError, match=message):
        check(models.sequential(2), 2, **options)


def test_a_model_that_does_not_run_in_the_dtype_is_refused() -> None:
    with pytest.raises(VPipeError, match="Single does not run in float64, even without a pipeline"):
        check((Single(), SINGLE_BATCH, functional.mse_loss), 1, dtype="float64")


def test_a_model_that_runs_in_float32_only_is_verified_in_it() -> None:
    found = check((Single(), SINGLE_BATCH, functional.mse_loss), 1)
    assert (found.dtype, found.ok) == ("float32", True)


def test_a_model_that_fails_whatever_its_dtype_is_explained_by_the_capture() -> None:
    class Unfinished(nn.Linear):
        def forward(self, hidden: Tensor) -> Tensor:
            return self.other(hidden)  # type: ignore[operator]

    with pytest.raises(VPipeError, match=r"cannot capture Unfinished: AttributeError.* 'other'"):
        verify(Unfinished(3, 3), SINGLE_BATCH, loss_fn=functional.mse_loss)


def test_muon_is_not_verified_in_float32() -> None:
    with pytest.raises(
        VPipeError, match="rounding of float32 large: choose another optimizer, such as adamw"
    ):
        verify(Single(), SINGLE_BATCH, loss_fn=functional.mse_loss, optimizer=optimizer_factory("muon", 1e-3))


SINGLE_BATCH = [torch.ones(2, 3), torch.ones(2, 3)]


class Single(nn.Module):
    """Mixes its own dtype with float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer(hidden) @ torch.ones(3, 3, dtype=torch.float32)


def test_draws_that_the_graph_does_not_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared with the graph of another model, the count of the draws is wrong, and nothing is claimed."""
    _, batch, loss_fn = models.sequential(2)
    other = capture(models.sequential(2)[0].double(), (batch[0].double(), batch[1]), loss_fn)
    monkeypatch.setattr("vpipe.verify.verification.train_synchronously", _with_graph(other))
    with pytest.raises(VPipeError, match="uses random numbers 2 times, its captured graph 0 times"):
        check(models.sequential(2, dropout=0.1), 2, updates=1)


def _with_graph(graph: Any) -> Callable[..., Any]:
    from vpipe.verify.reference import train_synchronously

    return lambda *arguments, **options: train_synchronously(*arguments[:-1], graph, **options)


def test_a_configured_run(tmp_path: Path) -> None:
    table = tmp_path / "own.csv"
    table.write_text(write_table(build("gpipe", 2, 2)))
    sizes: dict[str, Any] = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 32}
    config = RunConfig(**sizes, sequence_length=8, batch_size=2, schedule=str(table), recompute=True)
    result = verify_config(config, updates=2)
    assert result.ok, result
    assert (result.schedule, result.ranks, result.minibatches) == (str(table), 2, 4)
