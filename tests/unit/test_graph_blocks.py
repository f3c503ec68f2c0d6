"""Blocks: how many a model has, what they are known by, and how they are dealt out to stages.

Who sends what to whom: `test_graph_transparency.py`, where all models of the zoo are captured.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from itertools import combinations
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests import by_hand, models
from tests.drawing import draws
from vpipe.errors import PartitionError
from vpipe.graph import ModelGraph, capture
from vpipe.graph.partition import balanced_partition


@cache
def small_bert() -> ModelGraph:
    return capture(*models.bert(layers=1))


def seven_blocks() -> ModelGraph:
    return by_hand.captured("sequential")[3]


def bert_of(cls: Callable[..., nn.Module], layers: int, **sizes: int) -> tuple[nn.Module, dict[str, Tensor]]:
    with torch.device("meta"):
        model = cls(models.bert_config(layers, **sizes))
    batch = models.language_batch()
    if cls is hf.BertForPreTraining:
        batch["next_sentence_label"] = torch.zeros(models.BATCH, dtype=torch.long)
    return model, batch


@pytest.mark.parametrize(
    ("layers", "partition"), [(4, [2, 3, 3, 1]), pytest.param(24, [12, 13, 13, 11], marks=pytest.mark.long)]
)
def test_bert_large_has_two_blocks_a_layer_and_a_head(layers: int, partition: list[int]) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "vocab_size": 30522}
    graph = capture(*bert_of(hf.BertForPreTraining, layers, **sizes))
    assert len(graph.blocks) == 2 * layers + 1
    graph.stages(partition)
    assert graph.blocks[0].name == "bert.encoder.layer.0.attention"
    assert graph.blocks[7].name == "bert.encoder.layer.3/intermediate+output"
    assert "bert.embeddings.word_embeddings.weight" in graph.blocks[0].parameters
    assert "cls.predictions.transform.dense.weight" in graph.blocks[-1].parameters
    assert len({block.cut_bytes for block in graph.blocks[:-1]}) == 1
    assert graph.blocks[-1].cut_bytes == 0


def test_fingerprints_tell_models_apart_and_nothing_else() -> None:
    assert small_bert().fingerprint == capture(*bert_of(hf.BertForMaskedLM, 1)).fingerprint
    one = capture(*models.sequential(layers=2)).fingerprint
    assert one == capture(*models.sequential(layers=2)).fingerprint
    assert one != capture(*models.sequential(layers=2, dropout=0.5)).fingerprint
    assert one != capture(*models.sequential(layers=3)).fingerprint


def test_a_plan_is_for_the_blocks_whatever_the_batch_and_the_precision() -> None:
    model, batch, _ = models.bert(layers=1)
    one = small_bert().plan_fingerprint
    double = {name: torch.cat([field, field]) for name, field in batch.items()}
    assert one == capture(model, double).plan_fingerprint
    assert one == capture(models.bert(layers=1, dropout=0.5)[0].bfloat16(), batch).plan_fingerprint
    wider = bert_of(hf.BertForMaskedLM, 1, intermediate_size=80)
    assert one != capture(*wider).plan_fingerprint
    shallow, deep = (capture(*models.sequential(layers=layers)) for layers in (2, 3))
    assert shallow.plan_fingerprint != deep.plan_fingerprint


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        ([2, 3], r"\[2, 3\] sums to 5, but the model has 7 blocks; for example \[2, 5\]"),
        ([7, 1], r"sums to 8, but the model has 7 blocks"),
        ([0, 7], r"at least one"),
        ([-1, 8], r"at least one"),
        ([], r"at least one"),
        ([1] * 8, r"8 stages, but the model has only 7 blocks"),
    ],
)
def test_a_partition_that_does_not_fit_is_refused(partition: list[int], message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        seven_blocks().stages(partition)


def test_more_stages_than_blocks_are_refused() -> None:
    with pytest.raises(
        PartitionError, match=r"8 stages, but the model has only 7 blocks; use at most 7 stages"
    ):
        seven_blocks().balanced_partition(8)
    with pytest.raises(PartitionError, match="0 stages"):
        seven_blocks().balanced_partition(0)


@draws(60)
@given(st.data())
def test_balanced_partitions_are_optimal(data: Any) -> None:
    weights = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=9))
    stages = data.draw(st.integers(1, len(weights)))

    def heaviest(counts: tuple[int, ...]) -> int:
        ends = [sum(counts[: i + 1]) for i in range(len(counts))]
        return max(sum(weights[end - count : end]) for end, count in zip(ends, counts, strict=True))

    every = [
        tuple(b - a for a, b in zip((0, *cut), (*cut, len(weights)), strict=True))
        for cut in combinations(range(1, len(weights)), stages - 1)
    ]
    counts = balanced_partition(weights, stages)
    assert counts in every
    assert heaviest(counts) == min(map(heaviest, every))


class Branches(nn.Module):
    """Two narrow inputs, a wide middle, one number."""

    def __init__(self, *, autocast: bool = False) -> None:
        super().__init__()
        self.autocast = autocast
        self.text, self.numbers = nn.Linear(6, 12), nn.Linear(3, 12)
        self.middle = nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 24), nn.GELU())
        self.head = nn.Linear(24, 1)

    def forward(self, text: Tensor, numbers: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext():
            both = torch.cat([self.text(text), self.numbers(numbers)], -1)
            return self.head(self.middle(both)).square().mean()


BRANCHES = {"text": torch.zeros(4, 6), "numbers": torch.zeros(4, 3)}


def test_a_small_model_that_is_narrow_at_both_ends_is_cut() -> None:
    graph = capture(Branches(), BRANCHES)
    assert [block.name for block in graph.blocks] == ["text", "numbers", "middle.0", "middle.2", "head"]


def test_what_makes_one_block_of_layers_is_named() -> None:
    graph = capture(Branches(autocast=True), BRANCHES)
    message = r"only 1 blocks; .* inside torch.autocast .* use the argument precision instead"
    with pytest.raises(PartitionError, match=message):
        graph.partition_for_ranks([[0], [1]])
