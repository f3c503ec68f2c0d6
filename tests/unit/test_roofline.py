"""The weights of operations by a roofline, against sums by hand."""

from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional

from vpipe.cost import read_profile
from vpipe.graph import ModelGraph, capture
from vpipe.graph.inplace import operator_name
from vpipe.graph.partition import balanced_partition
from vpipe.graph.roofline import CPU, GPU, UNIT, Weight, operation_weight

ROWS, WIDTH, WORDS = 64, 128, 4096
MEASURED = Path(__file__).parents[2] / "docs" / "measured"


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids).view(-1, WIDTH)
        return functional.cross_entropy(self.head(hidden).float(), ids.flatten())


def weights(graph: ModelGraph, **flops: int) -> dict[str, Weight]:
    nodes = [node for block in graph.blocks for node in block.nodes]
    return {
        operator_name(node): operation_weight(node, graph.trace, flops.get(operator_name(node), 0))
        for node in nodes
    }


def units(seconds: float) -> int:
    return round(seconds / UNIT)


def test_each_operation_takes_the_longer_of_computing_and_moving() -> None:
    ids = torch.zeros(4, ROWS // 4, dtype=torch.long)
    graph = capture(Head().bfloat16(), {"ids": ids}, chunked_loss=False)
    logits = ROWS * WORDS
    moved = {
        "embedding": 2 * WORDS * WIDTH + 8 * ROWS + 2 * ROWS * WIDTH,
        "view": 0,
        "linear": 2 * (ROWS * WIDTH + WORDS * WIDTH + logits),
        "to": (2 + 4) * logits,
        "cross_entropy_loss": (4 + 4) * logits + 8 * ROWS + 4,
    }
    many = {"linear": 10**12}
    found = weights(graph, **many)
    for name in ("embedding", "view", "to"):
        seconds = moved[name] / GPU.bandwidth
        cpu = units(CPU.eager * moved[name] / CPU.bandwidth)
        assert found[name] == (units(GPU.eager * seconds), units(GPU.fused * seconds), cpu)
    loss = moved["cross_entropy_loss"]
    assert found["cross_entropy_loss"] == (
        *(units(loss / GPU.bandwidth),) * 2,
        units(CPU.loss * loss / CPU.bandwidth),
    )
    assert found["linear"] == (*(units(10**12 / GPU.peak[2]),) * 2, units(10**12 / CPU.peak[2]))
    few = moved["linear"]
    assert weights(graph, linear=1)["linear"] == (
        *(units(few / GPU.bandwidth),) * 2,
        units(few / CPU.bandwidth),
    )
    assert sum((block.weight for block in graph.blocks), Weight()).eager > found["to"].eager


def test_in_float32_a_product_takes_longer() -> None:
    ids = torch.zeros(4, ROWS // 4, dtype=torch.long)
    graph = capture(Head(), {"ids": ids})
    assert weights(graph, linear=10**12)["linear"].eager == units(10**12 / GPU.peak[4])


@pytest.mark.long
def test_the_demo_is_cut_for_a_cpu() -> None:
    """Shares that one core of a Xeon took for its blocks, forward and backward (`vpipe profile configs/demo.yml`)."""
    measured = [0.073, *[0.09, 0.072] * 3, 0.09, 0.35]
    config = hf.BertConfig(
        vocab_size=4096, hidden_size=192, num_hidden_layers=4, num_attention_heads=4, intermediate_size=768,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    with torch.device("meta"):
        model = hf.BertForMaskedLM(config)
    ids = torch.zeros(16, 64, dtype=torch.long)
    graph = capture(model, {"input_ids": ids, "labels": ids})
    assert graph.partition_for_ranks([[0], [1]], cpu=True) == (6, 3)
    whole = sum(block.weight.cpu for block in graph.blocks)
    for block, share in zip(graph.blocks, measured, strict=True):
        assert block.weight.cpu / whole == pytest.approx(share, rel=0.2)


@pytest.mark.long
def test_the_weights_of_qwen3_are_near_the_times_that_were_measured() -> None:
    """Of 8 x 512 tokens on a quarter of an H200, run eagerly (docs/performance.md).

    The loss of its head had no kernel of its own then, with which the head takes 14.1 ms instead of 23.4.
    """
    config = hf.Qwen3Config(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=2, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = hf.Qwen3ForCausalLM(config).bfloat16()
    ids = torch.zeros(8, 512, dtype=torch.long)
    graph = capture(model, {"input_ids": ids, "labels": ids})
    first, feed, attention, last, head = (block.weight.eager for block in graph.blocks)
    blocks = read_profile(MEASURED / "gpu_qwen3_profile.json").blocks
    times = [block.forward + block.backward for block in blocks]
    weighed = [first, feed, *[attention, feed] * 26, attention, last, head]
    assert len(weighed) == len(times)
    assert attention / feed == pytest.approx(times[2] / times[3], rel=0.5)
    cuts = list(accumulate(balanced_partition(weighed, 4)))
    for share in (1.0, 14.1 / 23.4):
        shown = [*times[:-1], share * times[-1]]
        assert head / (attention + feed) == pytest.approx(shown[-1] / sum(shown[2:4]), rel=0.35)
        # No stage of four is more than 15 % over the mean of the measured times.
        stages = [sum(shown[start:end]) for start, end in pairwise((0, *cuts))]
        print([round(1000 * stage, 1) for stage in stages], max(stages) / sum(stages) * 4)
        assert max(stages) < 1.15 * sum(stages) / 4
