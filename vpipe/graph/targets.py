"""The number of targets of a batch: what a loss that is a mean of cross-entropies is a mean over.

A model may leave some labels out (a causal one the first of each sample), so they are counted where the graph reads
them: the operations between the batch and the targets of the cross-entropy are run on the batch's fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from vpipe.graph.inplace import operator_name
from vpipe.graph.materialise import HOST
from vpipe.graph.model_graph import ModelGraph
from vpipe.graph.trace import Kind, Trace

LOSSES = ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d")
MEAN = 1
"""torch's number for this reduction."""
TargetCount = Callable[[Mapping[str, Tensor]], int]


def target_count(graph: ModelGraph) -> TargetCount | None:
    """Counts the targets of a batch; None if the loss is not one plain mean over targets that the batch holds."""
    trace = graph.trace
    found = [node for node in trace.nodes() if operator_name(node) in LOSSES]
    if len(found) != 1 or not _is_loss(found[0], trace):
        return None
    arguments = _arguments(found[0])
    target, weight = arguments["target"], arguments.get("weight")
    if weight is not None or arguments.get("reduction", MEAN) != MEAN or not isinstance(target, fx.Node):
        return None
    program = program_of_fields(target, trace)
    if program is None:
        return None
    fields, run = program
    ignored = arguments.get("ignore_index", -100)

    def count(batch: Mapping[str, Tensor]) -> int:
        with torch.no_grad():
            targets = run(*(batch[name].cpu() for name in fields))
        if targets.is_floating_point():  # probabilities of classes, all of which count
            return int(targets.numel() // targets.shape[1])
        return int((targets != ignored).sum())

    return count


def _is_loss(node: fx.Node, trace: Trace) -> bool:
    """Whether the model's loss is this value, perhaps with another type."""
    loss = trace.loss
    while loss is not node and operator_name(loss) in ("to", "_to_copy", "clone", "alias", "view"):
        loss = loss.all_input_nodes[0]
    return loss is node


def _arguments(node: fx.Node) -> dict[str, Any]:
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    return dict(zip(names, node.args, strict=False)) | node.kwargs


def program_of_fields(target: fx.Node, trace: Trace) -> tuple[list[str], fx.GraphModule] | None:
    """The fields that a value is made of, and how, on the host; None if it is not made of fields alone."""
    needed, pending = {target}, [target]
    while pending:
        for node in pending.pop().all_input_nodes:
            if node not in needed:
                needed.add(node)
                pending.append(node)
    sources = [node for node in trace.graph.nodes if node in needed and node.op == "placeholder"]
    others = [
        node
        for node in trace.graph.nodes
        if node in needed and node.op not in ("placeholder", "call_function")
    ]
    if others or any(trace.kind(node) is not Kind.FIELD for node in sources):
        return None
    graph, copies = fx.Graph(), {}
    for node in trace.graph.nodes:
        if node in sources:
            copies[node] = graph.placeholder(node.name)
        elif node in needed:
            copies[node] = copy = graph.node_copy(node, copies.__getitem__)
            copy.args, copy.kwargs = pytree.tree_map_only(
                torch.device, lambda _: HOST, (copy.args, copy.kwargs)
            )
    graph.output(copies[target])
    return [trace.inputs[node].name for node in sources], fx.GraphModule({}, graph)
