"""Opaque blocks: the children of an `nn.Sequential` that no exporter can follow.

Each child becomes one operation of the graph, which takes the hidden value, its buffers and its parameters, and calls
the module.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from vpipe.graph.exported import canonical_names
from vpipe.graph.loss import LossModule, find_loss
from vpipe.graph.materialise import materialise
from vpipe.graph.trace import Input, Kind, Size, Spec, Trace


class ModuleCall:
    """A child module as a function of its input, its buffers and its parameters.

    Keeps a copy of the module on `meta`, so that it does not hold the user's weights.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.__name__ = self.__qualname__ = "module_call"
        self.name = name
        self.module = copy.deepcopy(module).to("meta")
        self.buffers = [n for n, _ in module.named_buffers(remove_duplicate=False)]
        self.parameters = [n for n, _ in module.named_parameters(remove_duplicate=False)]

    def __repr__(self) -> str:
        return f"ModuleCall({self.name}, {self.module!r})"

    def __call__(self, hidden: Any, *state: Tensor) -> Any:
        # The child may begin with an in-place operation, which autograd refuses for a leaf.
        hidden = pytree.tree_map_only(Tensor, _not_a_leaf, hidden)
        names = [*self.buffers, *self.parameters]
        return torch.func.functional_call(self.module, dict(zip(names, state, strict=True)), (hidden,))

    def evaluation(self) -> ModuleCall:
        other = copy.copy(self)
        other.module = copy.deepcopy(self.module).eval()
        return other


class LossCall:
    """The loss function as one operation on the last child's output and the remaining fields."""

    def __init__(self, model: str, loss_fn: Callable[..., Tensor] | None) -> None:
        self.__name__ = self.__qualname__ = "loss_call"
        self.model = model
        self.loss_fn = loss_fn

    def __repr__(self) -> str:
        return f"LossCall({getattr(self.loss_fn, '__qualname__', type(self.loss_fn).__name__)})"

    def __call__(self, hidden: Any, *rest: Any) -> Tensor:
        return find_loss(hidden, list(rest), self.loss_fn, self.model)


def _not_a_leaf(value: Tensor) -> Tensor:
    return value.clone() if value.is_leaf and value.requires_grad else value


def trace_sequential(loss_module: LossModule, fields: dict[str, Tensor]) -> Trace:
    """A trace whose operations are the children of the `nn.Sequential` inside. One run gives the shapes."""
    model, layout = loss_module.model, loss_module.layout
    assert isinstance(model, nn.Sequential)
    graph = fx.Graph()
    inputs = {graph.placeholder(f"field_{name}"): Input(Kind.FIELD, name) for name in layout.tensors}
    by_name = {entry.name: node for node, entry in inputs.items()}
    batch_size = fields[layout.tensors[0]].shape[0]
    symbol = sympy.Symbol("batch", integer=True, positive=True)
    trace = Trace(
        graph,
        nn.Module(),
        inputs,
        loss=next(iter(inputs)),  # until there is one
        symbols={symbol: (layout.tensors[0], 0)},
        hints={symbol: batch_size},
    )

    def spec(value: Tensor) -> Spec:
        shape: tuple[Size, ...] = tuple(value.shape)
        if shape and batch_size and value.shape[0] % batch_size == 0:
            shape = (value.shape[0] // batch_size * symbol, *shape[1:])
        return Spec(shape, value.dtype)

    for name, node in by_name.items():
        trace.specs[node] = spec(fields[name])
    state = _state_nodes(model, trace)
    entries = {**layout.constants, **fields}
    hidden: Any = entries[layout.model_names[0]]
    value: Any = by_name.get(layout.model_names[0], hidden)
    boundaries: set[fx.Node] = set()
    for name, child in model.named_children():
        call = ModuleCall(name, child)
        names = [f"{name}.{own}" for own in (*call.buffers, *call.parameters)]
        node = graph.call_function(call, (value, *(state[own] for own in names)))
        node.meta["module_path"] = (name,)
        if call.parameters:
            boundaries.add(node)
        copies = materialise(model, names, seed=0)  # the run that finds the shapes changes nothing
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            hidden = call(_real(hidden), *(copies[own] for own in names))
        value = _result_nodes(trace, node, hidden, spec)
    rest = [name for name in layout.names if name not in layout.model_names]
    loss_call = LossCall(type(model).__name__, loss_module.loss_fn)
    arguments = [by_name.get(name, layout.constants.get(name)) for name in rest]
    trace.loss = graph.call_function(loss_call, (value, *arguments))
    trace.specs[trace.loss] = Spec((), loss_call(hidden, *(_real(entries[name]) for name in rest)).dtype)
    trace.boundaries = frozenset(boundaries)
    graph.output(trace.loss)
    return trace


def _state_nodes(model: nn.Module, trace: Trace) -> dict[str, fx.Node]:
    """A placeholder for each parameter and buffer, by name; the names of a tied tensor share it."""
    result: dict[str, fx.Node] = {}
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    for name, first in canonical_names(model).items():
        if name == first:
            tensor = parameters[name] if name in parameters else buffers[name]
            node = trace.graph.placeholder(f"state_{name}".replace(".", "_"))
            trace.inputs[node] = Input(Kind.PARAMETER if name in parameters else Kind.BUFFER, name)
            trace.specs[node] = Spec(tuple(tensor.shape), tensor.dtype)
            result[name] = node
        result[name] = result[first]
    return result


def _real(value: Any) -> Any:
    return pytree.tree_map_only(
        Tensor, lambda t: torch.zeros_like(t, device="cpu") if t.is_meta else t, value
    )


def _result_nodes(trace: Trace, node: fx.Node, result: Any, spec: Callable[[Tensor], Spec]) -> Any:
    """The node itself, or one `getitem` for each tensor of a tuple that the child returns."""
    if isinstance(result, Tensor):
        trace.specs[node] = spec(result)
        return node
    if isinstance(result, tuple | list):
        parts = []
        for index, part in enumerate(result):
            item = trace.graph.call_function(operator.getitem, (node, index))
            item.meta["module_path"] = node.meta["module_path"]
            parts.append(_result_nodes(trace, item, part, spec))
        return tuple(parts)
    return node
