"""Every model of the zoo, cut into stages, is the unpartitioned model."""

from __future__ import annotations

import pytest
import torch

from tests import by_hand, models
from vpipe.graph import capture


@pytest.mark.parametrize("stages", [2, 3, 4])
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


def test_mixtral_with_its_default_experts() -> None:
    model, batch, _ = models.mixtral(layers=2)
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
