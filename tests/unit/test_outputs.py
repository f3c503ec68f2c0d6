"""The model's outputs and a user's metrics, against the plain model."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import vpipe
from tests.examples import example
from tests.own_model import SOURCE
from vpipe.errors import CaptureError, VPipeError
from vpipe.pipeline.threads import run_ranks

pytestmark = pytest.mark.usefixtures("capture_once")
OWN: dict[str, Any] = {}
exec(SOURCE, OWN)
torch.manual_seed(0)
MODEL = OWN["Net"]()
FIELDS = ("ids", "kinds")
BATCHES = list(vpipe.Loader(OWN["Data"](38), 4))  # the last is smaller


def in_ranks(
    work: Callable[[Any], Any], model: Any = MODEL, ranks: int = 2, batch: Any = None, **options: Any
) -> Any:
    arguments: dict[str, Any] = {"loss_fn": OWN["loss"], "optimizer": torch.optim.SGD} | options

    def run(world: Any) -> Any:
        with vpipe.Pipeline(model, BATCHES[0] if batch is None else batch, world=world, **arguments) as pipe:
            return work(pipe)

    return run_ranks(ranks, run)


def same(ours: Any, theirs: Any) -> None:
    for one, other in zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


KINDS = {
    "1f1b": {"schedule": "1f1b"},
    "vpipe": {"schedule": "vpipe"},
    "2bw": {"schedule": "2bw", "update_interval": 3},
    "zb-v": {"schedule": "zb-v"},
    "replicas": {"schedule": "pipedream", "replicas": [1, 2], "ranks": 3},
    "one": {"schedule": "1f1b", "ranks": 1},
}


@pytest.mark.parametrize("kind", KINDS)
def test_predictions_are_those_of_the_plain_model(kind: str) -> None:
    ours, *others = in_ranks(lambda pipe: list(pipe.predict(BATCHES)), **KINDS[kind])
    assert all(output is None for other in others for output in other)
    plain = copy.deepcopy(MODEL).eval()
    with torch.no_grad():
        expected = [plain(*(batch[name] for name in FIELDS)) for batch in BATCHES]
    assert [list(output) for output in ours] == [["logits", "hidden"]] * 10
    same(ours, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_metrics_are_those_of_the_plain_model(kind: str) -> None:
    found = in_ranks(lambda pipe: pipe.evaluate(BATCHES, metrics=OWN["metrics"]), **KINDS[kind])
    losses = in_ranks(lambda pipe: pipe.evaluate(BATCHES), **KINDS[kind])
    plain = copy.deepcopy(MODEL).eval()
    outputs = [(plain(*(batch[name] for name in FIELDS)), batch) for batch in BATCHES]
    right = torch.cat([out["logits"].argmax(-1) % 2 == batch["targets"] % 2 for out, batch in outputs])
    expected = {"parity": right.double().mean().item(), "first": right[:, 0].double().mean().item()}
    assert found[0] == pytest.approx({"loss": losses[0], **expected})
    assert 0 < expected["parity"] < 1
    assert all(other == found[0] for other in found)


def test_training_goes_on_after_outputs() -> None:
    """Predicting between updates changes nothing, also while an asynchronous pipeline is full."""

    def work(pipe: vpipe.Pipeline, looks: bool) -> list[float]:
        losses = []
        for update, loss in pipe.train(BATCHES):
            losses.append(loss)
            if update == 3:
                pipe.flush()
                if looks:
                    list(pipe.predict(BATCHES[:3]))
                    pipe.evaluate(BATCHES[:3], metrics=OWN["metrics"])
        return losses

    for schedule in ("vpipe", "1f1b"):
        with_looks = in_ranks(lambda pipe: work(pipe, True), schedule=schedule, loss_fn=OWN["loss"])
        without = in_ranks(lambda pipe: work(pipe, False), schedule=schedule, loss_fn=OWN["loss"])
        assert with_looks == without


def test_no_more_outputs_are_held_than_a_round_has() -> None:
    most = 0

    def work(pipe: vpipe.Pipeline) -> None:
        nonlocal most

        def count(done: Any) -> None:
            nonlocal most
            most = max(most, len({number for number, _ in pipe.runtime.kept or ()}))

        pipe.on_action(count, ("F",))
        for _ in pipe.predict(BATCHES * 5):
            pass
        assert pipe.runtime.kept is None

    in_ranks(work, schedule="vpipe")
    assert 1 <= most <= 4


@dataclass
class Result:
    loss: Tensor
    best: Tensor
    note: str
    aside: Tensor


class Several(nn.Module):
    """Returns a dataclass with its loss, something that only the output needs, and something of an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
        self.unused = nn.Linear(6, 2)

    def forward(self, x: Tensor, y: Tensor) -> Result:
        logits = self.layers(x)
        loss = nn.functional.cross_entropy(logits, y)
        return Result(loss, logits.argmax(-1) + (x[:, 0] > 0), "mine", self.unused(x))


def test_what_only_the_output_needs_is_computed() -> None:
    model = Several()
    batch = {"x": torch.randn(4, 6), "y": torch.tensor([0, 1, 2, 3])}
    (output,), _ = in_ranks(lambda pipe: list(pipe.predict([batch])), model, batch=batch, loss_fn=None)
    expected = model(**batch)
    assert torch.equal(output["best"], expected.best)
    assert torch.allclose(output["loss"], expected.loss)
    assert output["note"] == "mine"
    assert output["aside"] is None  # its parameters are on no rank


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_models_of_transformers(name: str) -> None:
    model, batch, loss_fn = example(name, layers=2)
    (output,), _ = in_ranks(lambda pipe: list(pipe.predict([batch])), model, batch=batch, loss_fn=loss_fn)
    with torch.no_grad():
        expected = copy.deepcopy(model).eval()(**batch)
    assert type(output) is type(expected)
    assert torch.allclose(output.logits, expected.logits)
    assert torch.allclose(output.loss, expected.loss)


def test_a_loss_that_is_a_module() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    batch = (torch.randn(4, 6), torch.tensor([0, 1, 2, 0]))
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    losses = in_ranks(lambda pipe: pipe.evaluate([batch]), model, batch=batch, loss_fn=weighted)
    assert losses == pytest.approx([weighted(model(batch[0]), batch[1]).item()] * 2)

    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, output: Tensor, labels: Tensor) -> Tensor:
            return self.scale * nn.functional.cross_entropy(output, labels)

    with pytest.raises(
        CaptureError, match="loss_fn is a Learned with parameters, which would not be trained"
    ):
        in_ranks(lambda pipe: None, model, batch=batch, loss_fn=Learned())


class Branching(nn.Linear):
    """Looks at its data, so that it cannot be captured."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input if input.sum() > 0 else -input)


def test_children_that_run_eagerly_have_no_outputs() -> None:
    model = nn.Sequential(Branching(4, 4), Branching(4, 1))
    with pytest.raises(VPipeError, match="its children run eagerly: its outputs are not known"):
        in_ranks(
            lambda pipe: list(pipe.predict([torch.ones(2, 4)])),
            model,
            batch=torch.ones(2, 4),
            loss_fn=torch.mean,
        )


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (lambda output, batch: 0.5, "metrics returned float: return a dict of numbers by name"),
        (
            lambda output, batch: {"accuracy": "high"},
            "metric 'accuracy' is of type str: give a number, or a pair",
        ),
        (lambda output, batch: {"each": output["logits"]}, "metric 'each' is of type Tensor"),
        (lambda output, batch: {"loss": 0.5}, "metrics returned 'loss', .* give it another name"),
    ],
)
def test_mistakes_in_metrics(metrics: Any, message: str) -> None:
    with pytest.raises(VPipeError, match=message):
        in_ranks(lambda pipe: pipe.evaluate(BATCHES, metrics=metrics))


def test_an_error_of_metrics_reaches_every_rank() -> None:
    def evaluate(pipe: Any) -> tuple[str, float]:
        try:
            pipe.evaluate(BATCHES, metrics=lambda output, batch: {"ratio": 1 / 0})
        except Exception as error:
            return type(error).__name__, pipe.evaluate(BATCHES[:2])  # the pipeline still works
        raise AssertionError

    first, last = in_ranks(evaluate, ranks=2)
    assert (first[0], last[0]) == ("PeerError", "ZeroDivisionError")
    assert first[1] == last[1]
