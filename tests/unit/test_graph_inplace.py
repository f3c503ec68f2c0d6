"""In-place operations of captured graphs: no effect is lost, no cut runs through one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests import by_hand
from vpipe.graph import capture

WIDTH = 8


class Layered(nn.Module):
    """Four linear layers; subclasses say what happens around them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))


class InPlaceResidual(Layered):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        for layer in self.layers:
            x += layer(x.tanh())
        return x.square().mean()


class InPlaceActivation(Layered):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu_(layer(torch.dropout(x, 0.0, True)))
        return x.square().mean()


class WrittenSlices(Layered):
    """Results collected in one tensor, through views that nobody uses again."""

    def forward(self, x: Tensor) -> Tensor:
        collected = torch.zeros(x.shape[0], 4, WIDTH, dtype=x.dtype)
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index < 2:
                collected[:, index] = x
        for layer in self.layers:
            x = layer(x).tanh()
        return (collected.sum(1) * x).mean()


class ViewReadAfterWrite(Layered):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        left = x[:, :4]
        x.mul_(2)
        for layer in self.layers[1:]:
            x = x + layer(x)
        return (left.sum() * x).mean()


class WrittenField(Layered):
    def forward(self, x: Tensor) -> Tensor:
        x[:, 0] = 1.0
        mask = torch.ones_like(x)
        mask[:, 1] = 0
        mask.mul_(2)
        for layer in self.layers:
            x = layer(x * mask).tanh()
        return (x * mask).mean()


class Counting(Layered):
    """A buffer that is changed by hand and read again."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.5)
        x = x - self.mean
        for layer in self.layers[1:]:
            x = x + layer(x).tanh()
        return x.square().mean()


MODELS = [InPlaceResidual, InPlaceActivation, WrittenSlices, ViewReadAfterWrite, WrittenField, Counting]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("cls", MODELS)
def test_every_cut_gives_the_models_loss_and_gradients(cls: type[Layered], recompute: bool) -> None:
    model = cls().double()
    batch = torch.randn(4, WIDTH, dtype=torch.float64)
    graph = capture(model, batch)
    blocks = len(graph.blocks)
    loss, gradients, buffers = by_hand.run_eager(model, batch.clone(), None)
    for stages in range(1, blocks + 1):
        modules = by_hand.build(
            graph,
            model,
            graph.balanced_partition(stages),
            policies=dict.fromkeys(range(blocks), "recompute") if recompute else {},
        )
        untouched = batch.clone()
        by_hand.assert_same(by_hand.run(graph, modules, batch), (loss, gradients))
        assert torch.equal(batch, untouched)
        for module in modules:
            for name, buffer in module.buffers_by_name.items():
                torch.testing.assert_close(buffer, buffers[name])


@pytest.mark.parametrize("cls", [InPlaceResidual, InPlaceActivation])
def test_in_place_updates_do_not_glue_the_model_together(cls: type[Layered]) -> None:
    assert len(capture(cls(), torch.randn(4, WIDTH)).blocks) >= 4
