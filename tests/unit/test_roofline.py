"""The weights of operations by a roofline, against sums by hand."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from vpipe.graph import ModelGraph, capture
from vpipe.graph.inplace import operator_name
from vpipe.graph.roofline import BANDWIDTH, PEAK, UNIT, operation_weight

ROWS, WIDTH, WORDS = 64, 128, 4096


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids).view(-1, WIDTH)
        return functional.cross_entropy(self.head(hidden).float(), ids.flatten())


def weights(graph: ModelGraph, **flops: int) -> dict[str, int]:
    nodes = [node for block in graph.blocks for node in block.nodes]
    return {
        operator_name(node): operation_weight(node, graph.trace, flops.get(operator_name(node), 0))
        for node in nodes
    }


def test_each_operation_takes_the_longer_of_computing_and_moving() -> None:
    ids = torch.zeros(4, ROWS // 4, dtype=torch.long)
    graph = capture(Head().bfloat16(), {"ids": ids})
    logits = ROWS * WORDS
    moved = {
        "embedding": 2 * WORDS * WIDTH + 8 * ROWS + 2 * ROWS * WIDTH,
        "view": 0,
        "linear": 2 * (ROWS * WIDTH + WORDS * WIDTH + logits),
        "to": (2 + 4) * logits,
        "cross_entropy_loss": (4 + 4) * logits + 8 * ROWS + 4,
    }
    found = weights(graph)
    assert {name: found[name] for name in moved} == {
        name: round(count / BANDWIDTH / UNIT) for name, count in moved.items()
    }
    assert sum(found.values()) == sum(moved[name] / BANDWIDTH / UNIT for name in moved)
    assert sum(block.weight for block in graph.blocks) == sum(found.values())
    many = 10**12
    assert weights(graph, linear=many)["linear"] == round(many / PEAK[2] / UNIT)


def test_in_float32_a_product_takes_longer() -> None:
    ids = torch.zeros(4, ROWS // 4, dtype=torch.long)
    graph = capture(Head(), {"ids": ids})
    assert weights(graph, linear=10**12)["linear"] == round(10**12 / PEAK[4] / UNIT)
