"""Changes to captured operations when a stage is built: device, evaluation mode."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import fx

from vpipe.graph.inplace import operator_name
from vpipe.graph.opaque import ModuleCall
from vpipe.graph.ownership import bound_arguments

_TRAINING_FLAGS = ("train", "training", "use_input_stats")


def to_device(node: fx.Node, device: torch.device) -> None:
    """Let an operation that names a device (a factory, a `to`) name this one."""

    def move(argument: Any) -> Any:
        if isinstance(argument, torch.device):
            return device
        if isinstance(argument, list | tuple):
            return type(argument)(map(move, argument))
        return argument

    node.args = tuple(map(move, node.args))
    node.kwargs = {name: move(value) for name, value in node.kwargs.items()}
    if node.target is torch.ops.higher_order.wrap_with_autocast:
        node.args = (device.type, *node.args[1:])


def to_evaluation(node: fx.Node) -> None:
    """Turn dropout off and let norms use their running statistics."""
    if isinstance(node.target, ModuleCall):
        node.target = node.target.evaluation()
        return
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    values = bound_arguments(node)
    if "running_mean" in values and values["running_mean"] is None:
        return  # a norm without running statistics uses the batch's in either mode
    for flag in _TRAINING_FLAGS:
        if flag in values:
            _set_argument(node, flag, False)
    if operator_name(node) == "scaled_dot_product_attention":
        _set_argument(node, "dropout_p", 0.0)


def _set_argument(node: fx.Node, name: str, value: bool | float) -> None:
    assert isinstance(node.target, torch._ops.OpOverload)
    position = [argument.name for argument in node.target._schema.arguments].index(name)
    if position < len(node.args):
        node.update_arg(position, value)
    else:
        node.update_kwarg(name, value)


def rewritten_body(body: fx.GraphModule, device: torch.device, training: bool) -> fx.GraphModule:
    """A copy of a graph that no_grad or autocast wraps, changed like the graph around it."""
    result = copy.deepcopy(body)
    for module in result.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in module.graph.nodes:
            to_device(node, device)
            if not training:
                to_evaluation(node)
        module.recompile()
    return result
