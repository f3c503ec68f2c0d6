"""A pipeline run by hand, and the plain model to compare it with.

Stage after stage in one process; values and gradients are handed over as detached leaves.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from tests.captures import capture_once
from tests.examples import example
from vpipe.graph import ModelGraph
from vpipe.graph.batch import BatchLayout
from vpipe.graph.loss import LossModule
from vpipe.stage import RandomContext, StageModule


def build(
    graph: ModelGraph, model: nn.Module, partition: Sequence[int], **options: object
) -> list[StageModule]:
    return [StageModule(stage, model, **options) for stage in graph.stages(partition)]  # type: ignore[arg-type]


def run(
    graph: ModelGraph, modules: Sequence[StageModule], batch: object, minibatch: int = 0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss, and the gradient of each parameter summed over the stages that hold it."""
    fields = graph.batch_fields(batch)  # type: ignore[arg-type]
    made: dict[str, Tensor] = {}
    leaves: list[dict[str, Tensor]] = []
    contexts = []
    loss = None
    for module in modules:
        stage = module.stage
        own = {}
        for name, producer in stage.reads.items():
            assert producer < stage.index
            value = made[name].detach()
            assert value.shape == graph.shape(name, {field: tensor.shape for field, tensor in fields.items()})
            assert value.dtype == stage.value_dtype(name)
            own[name] = value.requires_grad_(stage.needs_gradient(name))
        context = RandomContext(seed=7, minibatch=minibatch)
        outputs = module(own, {name: fields[name] for name in stage.fields}, context)
        assert set(outputs) == set(stage.writes) | ({"loss"} if stage.is_criterion else set())
        if "loss" in outputs:
            loss = outputs.pop("loss")
        made.update(outputs)
        leaves.append(own)
        contexts.append(context)
    assert loss is not None
    gradients: dict[str, Tensor] = {}
    for module, own, context in zip(reversed(modules), reversed(leaves), reversed(contexts), strict=True):
        graded = [name for name in module.stage.writes if module.stage.needs_gradient(name)]
        roots = [made[name] for name in graded]
        given: list[Tensor | None] = [gradients.pop(name) for name in graded]
        if module.stage.is_criterion:
            roots.append(loss)
            given.append(None)
        if roots:
            torch.autograd.backward(roots, given)
        for name, value in own.items():
            if value.requires_grad:
                gradient = torch.zeros_like(value) if value.grad is None else value.grad
                gradients[name] = gradients[name] + gradient if name in gradients else gradient
        for work in context.deferred:
            work()
        context.deferred.clear()
    return loss.detach(), parameter_gradients(modules)


def parameter_gradients(modules: Sequence[StageModule]) -> dict[str, Tensor]:
    result: dict[str, Tensor] = {}
    for module in modules:
        for name, parameter in module.parameters_by_name.items():
            if parameter.grad is not None:
                result[name] = result[name] + parameter.grad if name in result else parameter.grad.clone()
    return result


def doubled(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: doubled(entry) for name, entry in value.items()}
    return type(value)(doubled(entry) for entry in value)


@cache
def captured(name: str) -> tuple[nn.Module, Any, Any, ModelGraph]:
    model, batch, loss_fn = example(name)
    return model, batch, loss_fn, capture_once(model, batch, loss_fn)


@cache
def eager(name: str) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Loss, gradients and buffers after one step of the plain model."""
    model, batch, loss_fn, _ = captured(name)
    return run_eager(model, batch, loss_fn)


def run_eager(
    model: nn.Module, batch: Any, loss_fn: Any
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    model = copy.deepcopy(model).train()
    layout = BatchLayout(model, batch, loss_fn)
    entries = layout.entries(batch)
    loss = LossModule(model, layout, loss_fn)([entries[name] for name in layout.tensors])
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients, dict(model.named_buffers())


def assert_same(got: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(got[0], expected[0], rtol=1e-12, atol=1e-12)
    assert got[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        scale = gradient.abs().max().item() + 1e-30
        torch.testing.assert_close(
            got[1][name], gradient, rtol=1e-12, atol=1e-12 * max(scale, 1e-3), msg=name
        )
