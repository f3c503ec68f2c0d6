"""Small models of one's own, for `vpipe converge` (docs/convergence.md): an MLP and a ViT on data that are made up.

vpipe converge benchmarks/small_vit.yml --schedules 1f1b:1,vpipe --optimizers adamw,muon --staleness none,predict
"""

import math

import torch
from torch import Tensor, nn

CLASSES, SIDE, WIDTH = 8, 16, 48


def loss(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, labels)


def mlp() -> nn.Module:
    """Six layers of 64."""
    layers: list[nn.Module] = [nn.Linear(16, 64), nn.ReLU()]
    for _ in range(4):
        layers += [nn.Linear(64, 64), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(64, CLASSES))


def points() -> list[tuple[Tensor, Tensor]]:
    """Points with the classes that another network gives them."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(20_000, 16, generator=generator)
    first, second = (torch.randn(shape, generator=generator) for shape in ((16, 32), (32, CLASSES)))
    labels = (torch.tanh(inputs @ first / 2) @ second).argmax(-1)
    return list(zip(inputs, labels, strict=True))


class ViT(nn.Module):
    """Four layers on 16 patches of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, WIDTH, 4, stride=4)
        self.position = nn.Parameter(torch.randn(1, 16, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(4)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        hidden = self.patch(image).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            hidden = block(hidden)
        return self.out(self.norm(hidden).mean(1))


def vit() -> nn.Module:
    return ViT()


def images() -> list[tuple[Tensor, Tensor]]:
    """Waves in four directions, plain or crossed by another, under noise."""
    generator = torch.Generator().manual_seed(0)
    count = 8000
    labels = torch.randint(CLASSES, (count,), generator=generator)
    phases, pitches = (torch.rand(count, 1, 1, generator=generator) for _ in range(2))
    angles = (labels % 4)[:, None, None] * (math.pi / 4)
    across, down = torch.meshgrid(torch.arange(float(SIDE)), torch.arange(float(SIDE)), indexing="ij")
    along = across * torch.cos(angles) + down * torch.sin(angles)
    beside = down * torch.cos(angles) - across * torch.sin(angles)
    waves = torch.sin((0.4 + 0.3 * pitches) * along + 2 * math.pi * phases)
    crossed = torch.where(labels[:, None, None] >= 4, torch.sin(0.7 * beside), 1.0)
    noise = 0.8 * torch.randn(count, 1, SIDE, SIDE, generator=generator)
    return list(zip((waves * crossed)[:, None] + noise, labels, strict=True))
