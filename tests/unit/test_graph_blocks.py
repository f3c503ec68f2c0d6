"""Blocks and stages: where models are cut, and who sends what to whom."""

from __future__ import annotations

from collections.abc import Callable
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
from vpipe.graph import ModelGraph, capture, edges, tied
from vpipe.graph.partition import balanced_partition


def captured(name: str) -> ModelGraph:
    return by_hand.captured(name)[3]


def bert_of(cls: Callable[..., nn.Module], layers: int, **sizes: int) -> tuple[nn.Module, dict[str, Tensor]]:
    with torch.device("meta"):
        model = cls(models.bert_config(layers, **sizes))
    batch = models.language_batch()
    if cls is hf.BertForPreTraining:
        batch["next_sentence_label"] = torch.zeros(models.BATCH, dtype=torch.long)
    return model, batch


def test_bert_with_24_layers_has_49_blocks() -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "vocab_size": 30522}
    graph = capture(*bert_of(hf.BertForPreTraining, 24, **sizes))
    assert len(graph.blocks) == 49
    graph.stages([12, 13, 13, 11])
    assert graph.blocks[0].name == "bert.encoder.layer.0.attention"
    assert graph.blocks[7].name == "bert.encoder.layer.3/intermediate+output"
    assert "bert.embeddings.word_embeddings.weight" in graph.blocks[0].parameters
    assert "cls.predictions.transform.dense.weight" in graph.blocks[48].parameters
    assert len({block.cut_bytes for block in graph.blocks[:-1]}) == 1
    assert graph.blocks[-1].cut_bytes == 0


@pytest.mark.parametrize("name", ["bert", "bert_pretraining", "gpt2", "llama", "gemma2", "qwen3", "mixtral"])
def test_two_blocks_a_layer_and_a_head(name: str) -> None:
    graph = captured(name)
    layers = 3 if name == "bert" else 2
    assert len(graph.blocks) == 2 * layers + 1
    residual = models.BATCH * models.LENGTH * 32 * 8
    assert [block.cut_bytes for block in graph.blocks[:-2]] == [residual] * (2 * layers - 1)
    assert graph.blocks[-2].cut_bytes in (residual, residual // 2)  # behind a norm that computes in float32
    assert len({block.name for block in graph.blocks}) == len(graph.blocks)


def test_t5_has_two_blocks_an_encoder_layer_and_three_a_decoder_layer() -> None:
    assert len(captured("t5").blocks) == 2 + 2 * 3 + 1


def test_all_parameters_that_the_loss_needs_lie_in_some_block() -> None:
    for name in models.ZOO:
        graph = captured(name)
        used = {parameter for block in graph.blocks for parameter in block.parameters}
        assert used == graph.parameters.keys(), name
        for stages in (1, 3, len(graph.blocks)):
            held = {p for stage in graph.stages(graph.balanced_partition(stages)) for p in stage.parameters}
            assert held == used


def test_masks_and_positions_are_never_sent() -> None:
    for name in ("bert", "gpt2", "llama", "gemma2", "mixtral"):
        graph = captured(name)
        for stage in graph.stages([1] * len(graph.blocks)):
            assert len(stage.reads) == (stage.index > 0)
            assert all(stage.needs_gradient(value) for value in stage.reads)


def test_long_skips_go_straight_to_their_readers() -> None:
    graph = captured("unet")
    assert len(graph.blocks) == 8  # a block a convolution
    stages = graph.stages([1, 2, len(graph.blocks) - 5, 2])
    assert 0 in stages[3].reads.values()
    assert (0, 3) in edges(stages)
    for stage in stages:
        for value, producer in stage.reads.items():
            assert stage.index in stages[producer].writes[value]


def test_the_encoders_output_reaches_every_decoder_stage_from_its_maker() -> None:
    graph = captured("t5")
    stages = graph.stages([2, 3, 4])
    (value,) = [value for value, readers in stages[0].writes.items() if readers == (1, 2)]
    assert stages[2].reads[value] == 0
    fields = graph.batch_fields(by_hand.captured("t5")[1])
    shapes = {name: field.shape for name, field in fields.items()}
    assert graph.shape(value, shapes) == (models.BATCH, models.LENGTH, 32)


def test_tied_parameters_have_one_name_and_all_their_holders() -> None:
    graph = captured("gpt2")
    stages = graph.stages([2, 1, 2])
    assert tied(stages) == {"transformer.wte.weight": (0, 2)}
    assert graph.parameters["transformer.wte.weight"].aliases == ("lm_head.weight",)
    assert "lm_head.weight" not in graph.parameters
    assert tied(captured("llama").stages([2, 3])) == {}


def test_statistics_belong_to_one_stage() -> None:
    graph = captured("unet_norm")
    buffers = [name for stage in graph.stages([1] * len(graph.blocks)) for name in stage.buffers]
    assert len(buffers) == len(set(buffers)) == len(graph.buffers)


def test_stages_read_only_the_fields_that_they_use() -> None:
    graph = captured("bert")
    first, last = graph.stages(graph.balanced_partition(2))
    assert "labels" not in first.fields
    assert "labels" in last.fields
    assert [stage.is_criterion for stage in (first, last)] == [False, True]


def test_fingerprints_tell_models_apart_and_nothing_else() -> None:
    one = capture(*models.bert(layers=1)).fingerprint
    assert one == capture(*bert_of(hf.BertForMaskedLM, 1)).fingerprint
    assert one != capture(*models.bert(layers=1, dropout=0.5)).fingerprint
    assert one != captured("bert").fingerprint


def test_a_plan_is_for_the_blocks_whatever_the_batch_and_the_precision() -> None:
    model, batch, _ = models.bert(layers=1)
    one = capture(model, batch).plan_fingerprint
    double = {name: torch.cat([field, field]) for name, field in batch.items()}
    assert one == capture(model, double).plan_fingerprint
    assert one == capture(models.bert(layers=1, dropout=0.5)[0].bfloat16(), batch).plan_fingerprint
    assert one != captured("bert").plan_fingerprint
    wider = bert_of(hf.BertForMaskedLM, 1, intermediate_size=80)
    assert one != capture(*wider).plan_fingerprint


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
        captured("bert").stages(partition)


def test_more_stages_than_blocks_are_refused() -> None:
    with pytest.raises(
        PartitionError, match=r"8 stages, but the model has only 7 blocks; use at most 7 stages"
    ):
        captured("bert").balanced_partition(8)
    with pytest.raises(PartitionError, match="0 stages"):
        captured("bert").balanced_partition(0)


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
