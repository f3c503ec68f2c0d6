"""Lengths: free where a captured graph takes any, fixed with a reason where it does not."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import vpipe
from vpipe.errors import BatchError
from vpipe.graph import capture
from vpipe.pipeline.threads import run_ranks


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], *, skip: int = 0, unrolled: bool = False) -> None:
        super().__init__()
        self.skip, self.unrolled = skip, unrolled
        self.embed = nn.Embedding(20, 8)
        self.layers = nn.ModuleList([kind(8, 8, batch_first=True) for _ in range(2)])
        self.head = nn.Linear(8, 20)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)[0] + hidden
        if self.unrolled:
            hidden = torch.stack([hidden[:, i] for i in range(hidden.shape[1])], 1)
        logits = self.head(hidden)[:, : ids.shape[1] - self.skip]
        return functional.cross_entropy(logits.flatten(0, 1), targets[:, self.skip :].flatten())


def tokens(length: int, samples: int = 2) -> dict[str, Tensor]:
    ids = torch.arange(samples * length).reshape(samples, length) % 20
    return {"ids": ids, "targets": ids.flip(1)}


def trained(model: nn.Module, batches: list[Any]) -> list[list[float]]:
    def run(world: Any) -> list[float]:
        options: dict[str, Any] = {"world": world, "optimizer": torch.optim.SGD, "minibatches": 2}
        with vpipe.Pipeline(model, batches[0], **options) as pipe:
            return [loss for _, loss in pipe.train(batches)]

    return run_ranks(2, run)


@pytest.mark.parametrize(("kind", "skip"), [(nn.LSTM, 1), pytest.param(nn.GRU, 0, marks=pytest.mark.long)])
def test_recurrent_layers_take_any_length(kind: type[nn.RNNBase], skip: int) -> None:
    torch.manual_seed(0)
    model = Recurrent(kind, skip=skip)
    batches = [tokens(length) for length in (3, 3, 5, 4)]
    expected = [float(model(**batch).detach()) for batch in batches[:2]]
    losses = trained(model, batches)
    assert losses[0] == losses[1]
    assert losses[0][0] == pytest.approx(sum(expected) / 2, rel=1e-6)
    graph = capture(model, batches[0])
    assert not graph.trace.unrolled
    assert graph.batch_fields(tokens(19, samples=5))["ids"].shape == (5, 19)


def test_a_length_over_which_the_graph_is_unrolled_is_named_before_training() -> None:
    model = Recurrent(nn.LSTM, unrolled=True)
    with pytest.warns(UserWarning, match="every batch must have size 3 in dimension 1 of field 'ids': torch"):
        trained(model, [tokens(3)] * 2)
    graph = capture(model, tokens(3))
    with pytest.raises(
        BatchError, match=r"expected 3 \(torch.export has fixed it, not the model; pad or cut"
    ):
        graph.batch_fields(tokens(4))


def test_a_size_that_the_model_needs_stays_without_a_warning() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    graph = capture(model, torch.ones(3, 6), torch.mean)
    assert not graph.trace.unrolled
    with pytest.raises(BatchError, match=r"expected 6 \(the captured graph needs it; pad or cut"):
        graph.batch_fields(torch.ones(3, 5))
