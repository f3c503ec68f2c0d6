"""Code that the exporter cannot follow by itself: LayerDrop, checks of values, the CTC loss, sizes of images."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from vpipe.errors import BatchError, CaptureError, PartitionError
from vpipe.graph import capture
from vpipe.graph.ctc_loss import ctc_loss


class Layers(nn.Module):
    """Skips layers at random, and checks its input."""

    def __init__(self, layerdrop: float = 0.0, least: float = -100.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.layerdrop = layerdrop
        self.least = least

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if x is not None and x.min() < self.least:
            raise ValueError("too small")
        if not torch.isfinite(x).all():
            raise ValueError("not finite")
        assert y.max() < 1e9
        for layer in self.layers:
            if self.training and torch.rand([]) < self.layerdrop:
                continue
            x = layer(x).tanh()
        return functional.mse_loss(x, y)


class Negated(Layers):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if torch.rand(()) >= self.layerdrop:
            x = self.layers[0](x)
        if x.sum() > 0:  # no check: both ways compute something
            x = self.layers[1](x)
        return functional.mse_loss(x, y)


def batch() -> list[Tensor]:
    return [torch.randn(4, 8), torch.randn(4, 8)]


def test_layerdrop_of_zero_and_checks_stay_out_of_the_graph() -> None:
    graph = capture(Layers(), batch())
    assert len(graph.blocks) == 4
    names = [str(node.target) for block in graph.blocks for node in block.nodes]
    assert not [name for name in names if "rand" in name or "isfinite" in name or "min" in name]


def test_layerdrop_above_zero_is_refused_in_one_sentence() -> None:
    with pytest.raises(CaptureError, match=r"compares it with 0\.1 .*LayerDrop.* to 0$"):
        capture(Layers(0.1), batch())


def test_layers_that_are_always_skipped() -> None:
    assert len(capture(Layers(1.0, least=-1e9), [*batch()]).blocks) == 1


def test_a_branch_that_computes_is_not_decided() -> None:
    with pytest.raises(CaptureError, match="control flow that depends on the data"):
        capture(Negated(), batch())


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("infinite", [False, True])
def test_the_ctc_loss_is_torchs(reduction: str, infinite: bool) -> None:
    torch.manual_seed(0)
    logits = torch.randn(20, 3, 7, dtype=torch.float64)
    targets, lengths = torch.randint(1, 7, (3, 6)), torch.tensor([6, 3, 6])
    steps = torch.tensor([20, 20, 5 if infinite else 15])  # 5 steps are too few for 6 letters
    found = []
    for function in (functional.ctc_loss, ctc_loss):
        given = logits.clone().requires_grad_()
        loss = function(given.log_softmax(-1), targets, steps, lengths, 0, reduction, infinite)
        (loss * torch.arange(1.0, 4.0)).sum().backward()
        found.append((loss.detach(), given.grad))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


def mlp(widths: list[int]) -> nn.Module:
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(layers)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return functional.mse_loss(x, y)

    return Model()


@pytest.mark.parametrize(
    ("widths", "blocks"),
    [
        (
            [8, 8, *[64] * 6, 8, 8],
            8,
        ),  # narrow at both ends: the cheap cuts there do not rule out those between
        ([64, 8, 64, 8, 64], 3),  # a cheap cut nearby on both sides does
        ([16] * 5, 4),
    ],
)
def test_a_cheap_cut_rules_out_its_neighbours_only(widths: list[int], blocks: int) -> None:
    example = [torch.randn(4, widths[0]), torch.randn(4, widths[-1])]
    assert len(capture(mlp(widths), example).blocks) == blocks


def test_too_many_stages_say_why_and_what_to_do() -> None:
    graph = capture(mlp([16, 16]), [torch.randn(4, 16), torch.randn(4, 16)])
    with pytest.raises(
        PartitionError, match=r"only 1 blocks.*at most 1 stages.*cheapest cuts.*nn\.Sequential"
    ):
        graph.balanced_partition(2)


class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 4, 8, stride=8)
        self.head = nn.Linear(4, 2)

    def forward(self, pixels: Tensor, label: Tensor) -> Tensor:
        features = self.patches(pixels).flatten(2).mean(-1)
        return functional.cross_entropy(self.head(features), label)


def test_images_keep_their_size_and_may_vary_in_number() -> None:
    graph = capture(Image(), [torch.randn(2, 3, 32, 32), torch.tensor([0, 1])])
    graph.check([torch.randn(5, 3, 32, 32), torch.tensor([0, 1, 0, 1, 0])])
    with pytest.raises(BatchError, match=r"size 40 in dimension 2, expected 32 .*pad or cut every batch"):
        graph.check([torch.randn(2, 3, 40, 32), torch.tensor([0, 1])])
