"""Every model of the zoo: where it is cut, who sends what to whom, and that its stages are the unpartitioned model.

All that takes the whole zoo is in this file, so that a model is captured once.
"""

from __future__ import annotations

import pytest
import torch

from tests import by_hand, models
from tests.both_ways import Check
from tests.examples import example, varied
from tests.unit.test_policies_runtime import PATTERNS, assert_equal, policies_of, train
from vpipe.graph import ModelGraph, capture, edges, tied


def graph_of(name: str) -> ModelGraph:
    return by_hand.captured(name)[3]


@pytest.mark.parametrize("name", ["bert", "bert_pretraining", "gpt2", "llama", "gemma2", "qwen3", "mixtral"])
def test_two_blocks_a_layer_and_a_head(name: str) -> None:
    graph = graph_of(name)
    layers = 3 if name == "bert" else 2
    assert len(graph.blocks) == 2 * layers + 1
    residual = models.BATCH * models.LENGTH * 32 * 8
    assert [block.cut_bytes for block in graph.blocks[:-2]] == [residual] * (2 * layers - 1)
    assert graph.blocks[-2].cut_bytes in (residual, residual // 2)  # behind a norm that computes in float32
    assert len({block.name for block in graph.blocks}) == len(graph.blocks)


def test_t5_has_two_blocks_an_encoder_layer_and_three_a_decoder_layer() -> None:
    assert len(graph_of("t5").blocks) == 2 + 2 * 3 + 1


def test_all_parameters_that_the_loss_needs_lie_in_some_block() -> None:
    for name in models.ZOO:
        graph = graph_of(name)
        used = {parameter for block in graph.blocks for parameter in block.parameters}
        assert used == graph.parameters.keys(), name
        for stages in (1, 3, len(graph.blocks)):
            held = {p for stage in graph.stages(graph.balanced_partition(stages)) for p in stage.parameters}
            assert held == used


def test_masks_and_positions_are_never_sent() -> None:
    for name in ("bert", "gpt2", "llama", "gemma2", "mixtral"):
        graph = graph_of(name)
        for stage in graph.stages([1] * len(graph.blocks)):
            assert len(stage.reads) == (stage.index > 0)
            assert all(stage.needs_gradient(value) for value in stage.reads)


def test_long_skips_go_straight_to_their_readers() -> None:
    graph = graph_of("unet")
    assert len(graph.blocks) == 8  # a block a convolution
    stages = graph.stages([1, 2, len(graph.blocks) - 5, 2])
    assert 0 in stages[3].reads.values()
    assert (0, 3) in edges(stages)
    for stage in stages:
        for value, producer in stage.reads.items():
            assert stage.index in stages[producer].writes[value]


def test_the_encoders_output_reaches_every_decoder_stage_from_its_maker() -> None:
    graph = graph_of("t5")
    stages = graph.stages([2, 3, 4])
    (value,) = [value for value, readers in stages[0].writes.items() if readers == (1, 2)]
    assert stages[2].reads[value] == 0
    fields = graph.batch_fields(by_hand.captured("t5")[1])
    shapes = {name: field.shape for name, field in fields.items()}
    assert graph.shape(value, shapes) == (models.BATCH, models.LENGTH, 32)


def test_tied_parameters_have_one_name_and_all_their_holders() -> None:
    graph = graph_of("gpt2")
    stages = graph.stages([2, 1, 2])
    assert tied(stages) == {"transformer.wte.weight": (0, 2)}
    assert graph.parameters["transformer.wte.weight"].aliases == ("lm_head.weight",)
    assert "lm_head.weight" not in graph.parameters
    assert tied(graph_of("llama").stages([2, 3])) == {}


def test_statistics_belong_to_one_stage() -> None:
    graph = graph_of("unet_norm")
    buffers = [name for stage in graph.stages([1] * len(graph.blocks)) for name in stage.buffers]
    assert len(buffers) == len(set(buffers)) == len(graph.buffers)


def test_stages_read_only_the_fields_that_they_use() -> None:
    graph = graph_of("bert")
    first, last = graph.stages(graph.balanced_partition(2))
    assert "labels" not in first.fields
    assert "labels" in last.fields
    assert [stage.is_criterion for stage in (first, last)] == [False, True]


@pytest.mark.parametrize("stages", [4, *(pytest.param(count, marks=pytest.mark.long) for count in (2, 3))])
@pytest.mark.parametrize("name", models.ZOO)
def test_stages_give_the_models_loss_and_gradients(name: str, stages: int) -> None:
    model, batch, _, graph = by_hand.captured(name)
    modules = by_hand.build(graph, model, graph.balanced_partition(stages))
    loss, gradients, buffers = by_hand.eager(name)
    by_hand.assert_same(by_hand.run(graph, modules, batch), (loss, gradients))
    for module in modules:
        for own, buffer in module.buffers_by_name.items():
            torch.testing.assert_close(buffer, buffers[own], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["bert", "llama", "vit", "unet", "sequential"])
def test_another_batch_size_and_length_than_captured(name: str) -> None:
    model, batch, loss_fn, graph = by_hand.captured(name)
    if name in ("bert", "llama"):
        batch = models.language_batch(batch=3, length=11, seed=5)
    else:
        batch = type(batch)(batch) if not isinstance(batch, dict) else dict(batch)
        first = {"vit": 3, "unet": 2, "sequential": 1}[name]
        if isinstance(batch, dict):
            batch = {key: value[:first] for key, value in batch.items()}
        else:
            batch = tuple(value[:first] for value in batch)
    modules = by_hand.build(graph, model, graph.balanced_partition(3))
    by_hand.assert_same(by_hand.run(graph, modules, batch), by_hand.run_eager(model, batch, loss_fn)[:2])


@pytest.mark.parametrize("name", models.ZOO)
@pytest.mark.parametrize("ranks", [4, pytest.param(2, marks=pytest.mark.long)])
def test_every_model_in_a_pipeline(check_synchronous: Check, name: str, ranks: int) -> None:
    check_synchronous(example(name), ranks, schedule="1f1b", updates=2)


@pytest.mark.parametrize("name", ["t5", "unet", "lstm", "untraceable"])
@pytest.mark.parametrize("schedule", ["zb-v", "interleaved"])
def test_long_skips_and_odd_models_in_chunks(check_synchronous: Check, name: str, schedule: str) -> None:
    check_synchronous(example(name), 2, schedule=schedule, updates=2)


@pytest.mark.parametrize("name", ["t5", "unet_norm", "lstm", "untraceable", "mixtral"])
@pytest.mark.parametrize(
    ("schedule", "patterns"),
    [
        ("zb-v", PATTERNS[2:3]),
        *(pytest.param(s, PATTERNS[:3], marks=pytest.mark.long) for s in ("gpipe", "zb-v")),
    ],
    ids=["all policies", "gpipe", "zb-v"],
)
@pytest.mark.usefixtures("capture_once")
def test_odd_models_keep_their_numbers(name: str, schedule: str, patterns: list[list[str]]) -> None:
    """To the bit, whatever is kept, recomputed or swapped."""
    given = example(name)
    batches = varied(given[1], 8)
    expected = train(given, 2, batches, schedule=schedule, minibatches=4)
    for pattern in patterns:
        policies = policies_of(pattern, len(graph_of(name).blocks))
        got = train(given, 2, batches, schedule=schedule, minibatches=4, policies=policies)
        assert_equal(got, expected)


def test_mixtral_with_its_default_experts() -> None:
    model, batch, _ = models.mixtral(layers=1)
    model.config._experts_implementation = "grouped_mm"
    graph = capture(model, batch)
    modules = by_hand.build(graph, model, graph.balanced_partition(3))
    got = by_hand.run(graph, modules, batch)
    loss, gradients, _ = by_hand.run_eager(model, batch, None)
    torch.testing.assert_close(got[0], loss, rtol=1e-5, atol=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(got[1][name], gradient, rtol=1e-3, atol=1e-6)


def test_a_cache_that_nobody_asked_for_changes_nothing() -> None:
    model, batch, _ = models.t5(layers=1)
    model, batch = model.double(), by_hand.doubled(batch)
    model.config.use_cache = True
    graph = capture(model, batch)
    modules = by_hand.build(graph, model, graph.balanced_partition(2))
    by_hand.assert_same(by_hand.run(graph, modules, batch), by_hand.run_eager(model, batch, None)[:2])


def test_frozen_parameters_ask_for_no_gradient() -> None:
    model, batch, loss_fn = models.sequential()
    model, batch = model.double(), by_hand.doubled(batch)
    for parameter in model[:7].parameters():
        parameter.requires_grad_(False)
    graph = capture(model, batch, loss_fn)
    partition = [1] * len(graph.blocks)
    stages = graph.stages(partition)
    assert [any(map(stage.needs_gradient, stage.reads)) for stage in stages[1:]][:2] == [False, False]
    assert all(any(map(stage.needs_gradient, stage.reads)) for stage in stages[4:])
    modules = by_hand.build(graph, model, partition)
    by_hand.assert_same(by_hand.run(graph, modules, batch), by_hand.run_eager(model, batch, loss_fn)[:2])


def test_parameters_that_the_loss_does_not_need_belong_to_no_stage() -> None:
    model, batch, loss_fn = models.sequential()
    model.spare = torch.nn.Linear(2, 2)
    model.forward = lambda input: torch.nn.Sequential.forward(model[:-1], input)  # type: ignore[method-assign]
    graph = capture(model, batch, loss_fn)
    held = {name for stage in graph.stages(graph.balanced_partition(2)) for name in stage.parameters}
    assert graph.parameters.keys() - held == {"spare.weight", "spare.bias"}
