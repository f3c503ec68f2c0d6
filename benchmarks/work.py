"""The work that every system of the benchmark does: one transformer, its data, its optimizer.

Eight layers, 384 wide, sequence 128, minibatches of 4. Nothing here knows about pipelines: a system either
takes the whole model (`build_model`) or its pieces in order (`Transformer.pieces`) and `loss`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

LAYERS = 8
WIDTH = 384
HEADS = 6
VOCABULARY = 4096
SEQUENCE = 128
MINIBATCH = 4
LEARNING_RATE = 1e-4
SEED = 0


class Embedding(nn.Module):
    """Token and position embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.zeros(SEQUENCE, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        return self.token(ids) + self.position  # [minibatch, sequence, width]


class Layer(nn.Module):
    """Causal attention, then a feed-forward of four times the width, both on the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.norm_feed = nn.LayerNorm(WIDTH)
        self.widen = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.project(self._attend(self.norm_attention(hidden)))
        return hidden + self.narrow(functional.gelu(self.widen(self.norm_feed(hidden))))

    def _attend(self, hidden: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2)  # [minibatch, heads, sequence, 64]
            for part in self.query_key_value(hidden).chunk(3, dim=-1)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return attended.transpose(1, 2).flatten(-2)


class Head(nn.Module):
    """The last norm and the map to the vocabulary, not tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.out(self.norm(hidden))  # [minibatch, sequence, vocabulary]


class Transformer(nn.Module):
    """The whole model: ids and labels in, mean loss out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = Head()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return loss(self.head(hidden), labels)

    def pieces(self) -> list[nn.Module]:
        """The embedding, each layer and the head, in order: each takes one tensor and gives one."""
        return [self.embedding, *self.layers, self.head]


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy over all positions."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def build_model() -> Transformer:
    """The model with the weights that every system starts from."""
    torch.manual_seed(SEED)
    return Transformer()


def batches(minibatches: int) -> list[tuple[Tensor, Tensor]]:
    """The minibatches of a step, as (ids, labels). Every step takes the same: loading is not the question."""
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(VOCABULARY, (minibatches, MINIBATCH, SEQUENCE + 1), generator=generator)
    return [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in tokens]


def build_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that every system steps."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)
