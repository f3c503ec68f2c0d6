"""Batches whose fields are dicts, lists and tuples."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import vpipe
from vpipe.errors import BatchError
from vpipe.graph import capture
from vpipe.pipeline.threads import run_ranks


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pixels, self.words = nn.Linear(6, 16), nn.Embedding(10, 16)
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.head = nn.Linear(16, 2)

    def forward(self, inputs: dict[str, Any], scales: tuple[Tensor, float]) -> dict[str, Tensor]:
        hidden = self.pixels(inputs["image"]["pixels"]) + self.words(inputs["words"])
        for layer in self.layers:
            hidden = layer(hidden).relu() * scales[0][:, None] * scales[1]
        return {"logits": self.head(hidden)}


def batch(samples: int = 4, seed: int = 0) -> dict[str, Any]:
    drawn = torch.Generator().manual_seed(seed)
    image = {"pixels": torch.randn(samples, 6, generator=drawn), "kind": "grey"}
    words = torch.randint(10, (samples,), generator=drawn)
    labels = torch.randint(2, (samples,), generator=drawn)
    return {
        "inputs": {"image": image, "words": words},
        "scales": (torch.ones(samples), 0.5),
        "target": [labels],
    }


def loss(output: dict[str, Tensor], target: list[Tensor]) -> Tensor:
    return functional.cross_entropy(output["logits"], target[0])


def test_nested_batches_train_like_the_plain_model() -> None:
    torch.manual_seed(0)
    model = Nested()
    result = vpipe.verify(model, batch(), loss_fn=loss, schedule="1f1b", ranks=2)
    assert result.ok, result.differences
    batches = [batch(samples, seed) for seed, samples in enumerate((4, 3, 5, 4))]

    def run(world: Any) -> Any:
        options: dict[str, Any] = {"world": world, "loss_fn": loss, "optimizer": torch.optim.SGD}
        with vpipe.Pipeline(model, batches[0], minibatches=4, **options) as pipe:
            count = lambda output, given: {"right": output["logits"].argmax(-1).eq(given["target"][0]).sum()}  # noqa: E731
            return [pipe.evaluate(batches, metrics=count), *(each for _, each in pipe.train(batches))]

    first, second = run_ranks(2, run)
    assert first == second
    with torch.no_grad():
        plain = [float(loss(model(given["inputs"], given["scales"]), given["target"])) for given in batches]
    mean = sum(value * samples for value, samples in zip(plain, (4, 3, 5, 4), strict=True)) / 16
    assert first[1] == pytest.approx(mean, rel=1e-5)
    assert first[0]["loss"] == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": []}, r"field 'target' is a list of 0, but the model was captured with another structure"),
        ({"target": torch.ones(4)}, "field 'target' is Tensor, but the model was captured with another"),
        ({"scales": (torch.ones(4), 0.7)}, r"field 'scales.1' is 0.7, but the model was captured with 0.5"),
        ({"scales": (torch.ones(3), 0.5)}, "disagree about the number of samples|'scales.0' has size 3"),
    ],
)
def test_mistakes_name_the_place_inside(change: dict[str, Any], message: str) -> None:
    graph = capture(Nested(), batch(), loss)
    assert list(graph.batch_fields(batch(7))) == [
        "inputs.image.pixels",
        "inputs.words",
        "scales.0",
        "target.0",
    ]
    with pytest.raises(BatchError, match=message):
        graph.batch_fields(batch() | change)


def test_a_field_that_is_no_tensor_is_named() -> None:
    with pytest.raises(
        BatchError, match=r"field 'inputs.image.pixels' is a object; .* or a dict, list or tuple"
    ):
        capture(Nested(), {**batch(), "inputs": {"image": {"pixels": object()}, "words": 1}}, loss)
