"""Segments: consecutive blocks of a stage as one Python function, adapted to device, mode and split backward."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from vpipe.graph import StageGraph
from vpipe.graph.head import VIEWS, Head
from vpipe.graph.inplace import operator_name, written
from vpipe.graph.opaque import ModuleCall
from vpipe.graph.ownership import bound_arguments, is_random
from vpipe.graph.trace import Input, Kind, Spec
from vpipe.stage import head_loss
from vpipe.stage.compiled import BLOCK, SPEC, compile_regions
from vpipe.stage.head_kernel import compiled_kernel
from vpipe.stage.split import split_product

_TRAINING_FLAGS = ("train", "training", "use_input_stats")


@dataclass(frozen=True)
class Options:
    """The options of a StageModule that all its segments share; `compile` names a backend of torch.compile."""

    device: torch.device
    training: bool
    split: bool
    compile: str | None = None


@dataclass(frozen=True)
class Segment:
    """A function from (context, inputs...) to a tuple of values.

    `inputs` say where each argument comes from (a name alone: a value of an earlier segment or stage), `outputs` name
    the results, `mutated` are the positions of the buffers that the function changes.
    """

    function: fx.GraphModule
    inputs: tuple[str | Input, ...]
    outputs: tuple[str, ...]
    mutated: tuple[int, ...]
    policy: str = "keep"


def build_segment(
    stage: StageGraph,
    parts: Sequence[tuple[int | None, Sequence[fx.Node]]],
    outputs: Sequence[fx.Node],
    options: Options,
    policy: str = "keep",
) -> Segment:
    """A function of the operations of some blocks; a part without block index draws no random numbers."""
    trace = stage.trace
    own = {node for _, nodes in parts for node in nodes}
    builder = _Builder(stage, options, own, outputs)
    read = dict.fromkeys(arg for _, nodes in parts for node in nodes for arg in node.all_input_nodes)
    inputs = [node for node in read if node not in own and node.op != "get_attr"]
    for node in inputs:
        builder.copies[node] = builder.graph.placeholder(node.name)
        builder.copies[node].meta[SPEC] = builder.spec(node)
    for index, nodes in parts:
        builder.add_block(index, nodes)
    builder.graph.output(tuple(builder.copies[node] for node in outputs))
    function = fx.GraphModule(builder.bodies, builder.graph)
    if options.compile:
        function = compile_regions(function, options.compile)
    return Segment(
        function,
        tuple(trace.inputs.get(node, node.name) for node in inputs),
        tuple("loss" if node is trace.loss else node.name for node in outputs),
        tuple(i for i, node in enumerate(inputs) if node in stage.ownership.mutated),
        policy,
    )


class _Builder:
    """A new graph to which captured operations are copied, changed as the options say."""

    def __init__(
        self, stage: StageGraph, options: Options, own: set[fx.Node], outputs: Iterable[fx.Node]
    ) -> None:
        self.trace = stage.trace
        self.clusters = stage.ownership.clusters
        self.options = options
        self.trained = stage.ownership.differentiable if options.training else frozenset()
        whole = (head for head in self.trace.heads if head.nodes <= own)
        self.heads = [head for head in whole if head.nodes.isdisjoint({*outputs} - {head.loss})]
        self.graph = fx.Graph()
        self.context = self.graph.placeholder("context")
        self.copies: dict[fx.Node, fx.Node] = {}
        self.bodies: dict[str, nn.Module] = {}
        self._block: int | None = None

    def spec(self, node: fx.Node) -> tuple[Any, bool]:
        """What a compiled function of the node depends on: its shape, and whether it is frozen."""
        entry, specs = self.trace.inputs.get(node), self.trace.specs
        return specs.get(node), entry is not None and entry.name in self.trace.frozen

    def add_block(self, index: int | None, nodes: Sequence[fx.Node]) -> None:
        draws = self.options.training and any(is_random(node, self.trace.root) for node in nodes)
        if index is not None and draws:
            self.graph.call_method("seed_block", (self.context, index, self.options.device))
        self._block = index
        for node in nodes:
            if self.options.training or not self._only_updates_buffers(node):
                self._add(node)

    def _only_updates_buffers(self, node: fx.Node) -> bool:
        """An update of a buffer that nobody reads (a norm's counter): evaluation leaves it out."""
        buffers = [b for arg in written(node, self.trace.root) for b in self.clusters[arg].members]
        return not node.users and any(self.trace.kind(buffer) is Kind.BUFFER for buffer in buffers)

    def _add(self, node: fx.Node) -> None:
        head = next((head for head in self.heads if node in head.nodes), None)
        if head is not None:
            if node is head.loss:
                self._add_head(head)
            return
        if node.op == "get_attr":
            self._copy_body(node)
            return
        for body in [arg for arg in node.all_input_nodes if arg.op == "get_attr" and arg not in self.copies]:
            self._copy_body(body)
        copied = self.graph.node_copy(node, self.copies.__getitem__)
        copied.meta = {BLOCK: self._block, SPEC: self.spec(node)}
        _adapt(copied, self.options)
        if _lacks_grouped_kernel(copied, self.spec(node)[0], self.options.device):
            copied.target = _attention_of_groups
        if self.options.split:
            trained = {
                self.copies[arg]
                for arg in node.all_input_nodes
                if self.trace.kind(arg) is Kind.PARAMETER
                and self.trace.inputs[arg].name not in self.trace.frozen
            }
            split_product(copied, trained, self.context)
        self.copies[node] = copied

    def _add_head(self, head: Head) -> None:
        """Product and loss in pieces (`head_loss.py`); the tokens are rearranged before as the logits would be."""

        def call(target: Any, *args: Any) -> fx.Node:
            node = self.graph.call_function(target, args)
            node.meta = {BLOCK: self._block, SPEC: self.spec(head.loss)}
            return node

        hidden = self.copies[head.hidden]
        for move in head.moves:
            args: Any = fx.map_arg(move.args[1:], self.copies.__getitem__)
            if operator_name(move) in VIEWS:
                args = ([*args[0][:-1], head.size],)
            hidden = call(move.target, hidden, *args)
        arguments = (
            call(torch.ops.aten.reshape.default, hidden, [-1, head.size]),
            self.copies[head.weight],
            None if head.bias is None else self.copies[head.bias],
            call(torch.ops.aten.reshape.default, self.copies[head.target], [-1]),
            *(head.scale, head.cap, head.smoothing, head.ignored, head.mean),
            torch.float32 if head.dtype.itemsize == 2 else head.dtype,
        )
        gradients = head.hidden in self.trained, not self.trained.isdisjoint((head.weight, head.bias))
        half = self.trace.specs[head.weight].dtype in head_loss.HALF
        if half and self.options.device.type == "cuda":
            compiled_kernel()  # now: while CUDA graphs are captured it could not be tried
        if half and any(gradients):
            made = call(torch.ops.vpipe.head_loss_and_gradients.default, *arguments, *gradients)
            loss = call(operator.getitem, made, 0)
        else:
            loss = call(torch.ops.vpipe.head_loss.default, *arguments)
        self.copies[head.loss] = call(torch.ops.aten.to.dtype, loss, self.trace.specs[head.loss].dtype)

    def _copy_body(self, node: fx.Node) -> None:
        """Copy a graph that no_grad or autocast wraps, changed like the graph around it."""
        name = f"body_{len(self.bodies)}"
        body = copy.deepcopy(self.trace.root.get_submodule(str(node.target)))
        for module in body.modules():
            if isinstance(module, fx.GraphModule):
                for inner in module.graph.nodes:
                    _adapt(inner, self.options)
                module.recompile()
        self.bodies[name] = body
        self.copies[node] = self.graph.get_attr(name)


def _adapt(node: fx.Node, options: Options) -> None:
    _to_device(node, options.device)
    if not options.training:
        _to_evaluation(node)


def _lacks_grouped_kernel(node: fx.Node, spec: Spec | None, device: torch.device) -> bool:
    """Attention with grouped heads whose fused kernels take none: on a GPU those of float32 and float64."""
    if operator_name(node) != "scaled_dot_product_attention" or not node.kwargs.get("enable_gqa"):
        return False
    return device.type == "cuda" and spec is not None and spec.dtype not in head_loss.HALF


def _attention_of_groups(
    query: Tensor, key: Tensor, value: Tensor, *rest: Any, scale: float | None, enable_gqa: bool
) -> Tensor:
    times = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    return torch.ops.aten.scaled_dot_product_attention(query, key, value, *rest, scale=scale)


def _to_device(node: fx.Node, device: torch.device) -> None:
    """Replace the device that an operation names (a factory, a `to`)."""

    def move(argument: Any) -> Any:
        return device if isinstance(argument, torch.device) else argument

    node.args, node.kwargs = map_aggregate((node.args, node.kwargs), move)
    if node.target is torch.ops.higher_order.wrap_with_autocast:
        node.args = (device.type, *node.args[1:])


def _to_evaluation(node: fx.Node) -> None:
    """Turn dropout off and let norms use their running statistics."""
    if isinstance(node.target, ModuleCall):
        node.target = node.target.evaluation()
        return
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    values = bound_arguments(node)
    if "running_mean" in values and values["running_mean"] is None:
        return  # a norm without running statistics uses the batch's in either mode
    changed: dict[str, bool | float] = {flag: False for flag in _TRAINING_FLAGS if flag in values}
    if operator_name(node) == "scaled_dot_product_attention":
        changed["dropout_p"] = 0.0
    names = [argument.name for argument in node.target._schema.arguments]
    for name, value in changed.items():
        if names.index(name) < len(node.args):
            node.update_arg(names.index(name), value)
        else:
            node.update_kwarg(name, value)
