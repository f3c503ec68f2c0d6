"""Segments: stretches of a stage compiled to one Python function each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from vpipe.graph.inplace import Clusters, written
from vpipe.graph.ownership import is_random
from vpipe.graph.trace import Input, Kind, Trace
from vpipe.stage.compiled import BLOCK, SPEC, Compiler
from vpipe.stage.rewrite import rewritten_body, to_device, to_evaluation
from vpipe.stage.split import split_product


@dataclass(frozen=True)
class Options:
    """How a stage is built: see `StageGraph.build`."""

    device: torch.device
    training: bool
    split: bool
    compiler: Compiler | None = None


@dataclass(frozen=True)
class Segment:
    """A function from (context, inputs...) to a tuple of values.

    `inputs` say where each argument comes from (a name alone: a value made before), `outputs` name the
    results, `mutated` are the positions of the buffers that the function changes.
    """

    function: fx.GraphModule
    inputs: tuple[str | Input, ...]
    outputs: tuple[str, ...]
    mutated: tuple[int, ...]
    recompute: bool = False
    swap: bool = False


def build_segment(
    trace: Trace,
    parts: Sequence[tuple[int | None, Sequence[fx.Node]]],
    outputs: Sequence[fx.Node],
    clusters: Clusters,
    options: Options,
    recompute: bool = False,
    swap: bool = False,
) -> Segment:
    """Compile the operations of some blocks; a part without block index draws no random numbers."""
    builder = _Builder(trace, clusters, options)
    own = {node for _, nodes in parts for node in nodes}
    inputs = _inputs(trace, own, parts)
    for node in inputs:
        builder.copies[node] = builder.graph.placeholder(node.name)
        builder.copies[node].meta[SPEC] = builder.spec(node)
    for index, nodes in parts:
        builder.add_block(index, nodes)
    builder.graph.output(tuple(builder.copies[node] for node in outputs))
    function = fx.GraphModule(builder.bodies, builder.graph)
    if options.compiler is not None:
        function = options.compiler.compiled(function)
    return Segment(
        function,
        tuple(trace.inputs.get(node, node.name) for node in inputs),
        tuple("loss" if node is trace.loss else node.name for node in outputs),
        tuple(
            i for i, node in enumerate(inputs) if trace.kind(node) is Kind.BUFFER and clusters.writes(node)
        ),
        recompute,
        swap,
    )


def _inputs(
    trace: Trace, own: set[fx.Node], parts: Sequence[tuple[int | None, Sequence[fx.Node]]]
) -> list[fx.Node]:
    """What the operations read from elsewhere; wrapped graphs are not read but copied along."""
    read = dict.fromkeys(arg for _, nodes in parts for node in nodes for arg in node.all_input_nodes)
    return [node for node in read if node not in own and node.op != "get_attr"]


class _Builder:
    """A new graph to which captured operations are copied, changed as the options say."""

    def __init__(self, trace: Trace, clusters: Clusters, options: Options) -> None:
        self.trace = trace
        self.clusters = clusters
        self.options = options
        self.graph = fx.Graph()
        self.context = self.graph.placeholder("context")
        self.copies: dict[fx.Node, fx.Node] = {}
        self.bodies: dict[str, nn.Module] = {}
        self._block: int | None = None

    def spec(self, node: fx.Node) -> tuple[Any, bool]:
        """What a compiled function of the node depends on: its shape, and whether it is trained."""
        kind, specs = self.trace.inputs.get(node), self.trace.specs
        return specs.get(node), kind is not None and kind.name in self.trace.frozen

    def add_block(self, index: int | None, nodes: Sequence[fx.Node]) -> None:
        draws = self.options.training and any(is_random(node, self.trace.root) for node in nodes)
        if index is not None and draws:
            self.graph.call_method("seed_block", (self.context, index, self.options.device))
        self._block = index
        for node in nodes:
            if not (self._only_updates_buffers(node) and not self.options.training):
                self._add(node)

    def _only_updates_buffers(self, node: fx.Node) -> bool:
        """An update of a buffer that nobody reads (a norm's counter): evaluation leaves it out."""
        buffers = [b for arg in written(node, self.trace.root) for b in self.clusters.members(arg)]
        return not node.users and any(self.trace.kind(buffer) is Kind.BUFFER for buffer in buffers)

    def _add(self, node: fx.Node) -> None:
        if node.op == "get_attr":
            self._copy_body(node)
            return
        for body in [arg for arg in node.all_input_nodes if arg.op == "get_attr" and arg not in self.copies]:
            self._copy_body(body)
        copied = self.graph.node_copy(node, self.copies.__getitem__)
        copied.meta = {BLOCK: self._block, SPEC: self.spec(node)}
        to_device(copied, self.options.device)
        if not self.options.training:
            to_evaluation(copied)
        if self.options.split:
            trained = {
                self.copies[arg]
                for arg in node.all_input_nodes
                if self.trace.kind(arg) is Kind.PARAMETER
                and self.trace.inputs[arg].name not in self.trace.frozen
            }
            split_product(copied, trained, self.context)
        self.copies[node] = copied

    def _copy_body(self, node: fx.Node) -> None:
        name = f"body_{len(self.bodies)}"
        body = self.trace.root.get_submodule(str(node.target))
        assert isinstance(body, fx.GraphModule)
        self.bodies[name] = rewritten_body(body, self.options.device, self.options.training)
        self.copies[node] = self.graph.get_attr(name)
