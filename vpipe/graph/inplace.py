"""In-place operations: the operations that share a storage, and those that write it.

A captured graph holds operations such as `copy_` that nobody uses by name:

    zeros = aten.zeros(...)            # 1: makes the storage
    left  = aten.slice(zeros, 1, 0, 4) # 2: a view of 1
    aten.copy_(left, ids)              # 3: no user, yet it changes 1
    embed = aten.embedding(w, zeros)   # 4: reads what 3 wrote

1, 2 and 3 share a storage: they form a *cluster*, which must not be cut. Where nobody reads an older name of the
storage after the write (`x += y`, `relu_`), the write is replaced by its out-of-place form and the cluster dissolves,
so that a residual stream that is updated in place can still be cut.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from vpipe.graph.opaque import ModuleCall
from vpipe.graph.trace import Kind, Trace, submodules

# Operations whose schema does not say that they write their running statistics (arguments 3 and 4).
_NORMS = {"batch_norm", "instance_norm", "_batch_norm_impl_index"}
# Operations whose schema does not say that their results are views of their arguments.
_SILENT_VIEWS = {"broadcast_tensors", "meshgrid"}


def operator_name(node: fx.Node) -> str:
    """`relu_` for `aten.relu_.default`; empty for what is not an aten-like operator."""
    target = node.target
    return target._schema.name.split("::")[-1] if isinstance(target, torch._ops.OpOverload) else ""


def given_arguments(node: fx.Node) -> Iterator[tuple[torch._C.Argument, Any]]:
    """The arguments of the operator's schema for which the node has a value, with that value."""
    assert isinstance(node.target, torch._ops.OpOverload)
    for position, argument in enumerate(node.target._schema.arguments):
        if position < len(node.args) and not argument.kwarg_only:
            yield argument, node.args[position]
        elif argument.name in node.kwargs:
            yield argument, node.kwargs[argument.name]


def written(node: fx.Node, root: nn.Module) -> list[fx.Node]:
    """The arguments whose storage the node writes."""
    if isinstance(node.target, ModuleCall):
        return list(node.args[1 : 1 + len(node.target.buffers)])  # type: ignore[arg-type]
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return _written_inside(node, root)
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    if operator_name(node) in _NORMS:
        training = node.args[5]
        return [arg for arg in node.args[3:5] if isinstance(arg, fx.Node)] if training else []
    result: list[fx.Node] = []
    for argument, value in given_arguments(node):
        if argument.alias_info is not None and argument.alias_info.is_write:
            fx.map_arg(value, result.append)
    return result


def _operands(node: fx.Node) -> list[fx.Node]:
    """The arguments that a higher-order operation passes to the graph that it wraps."""
    after = [i for i, arg in enumerate(node.args) if isinstance(arg, fx.Node) and arg.op == "get_attr"]
    return [arg for arg in node.args[after[-1] + 1 :] if isinstance(arg, fx.Node)] if after else []


def _written_inside(node: fx.Node, root: nn.Module) -> list[fx.Node]:
    result: list[fx.Node] = []
    for body in submodules(node, root):
        clusters = find_clusters(body.graph, body)
        placeholders = body.graph.find_nodes(op="placeholder")
        operands = zip(_operands(node), placeholders, strict=False)
        result += [outer for outer, inner in operands if clusters[inner].writes]
    return result


def aliased(node: fx.Node) -> list[fx.Node]:
    """The arguments with which the node's result may share its storage."""
    if node.target is operator.getitem:
        return [node.args[0]]  # type: ignore[list-item]
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return _operands(node)
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    name = operator_name(node)
    if name in _NORMS:
        return []
    if name in _SILENT_VIEWS or torch.Tag.maybe_aliasing_or_mutating in node.target.tags:
        return node.all_input_nodes
    shared = [r.alias_info.before_set for r in node.target._schema.returns if r.alias_info is not None]
    result: list[fx.Node] = []
    for argument, value in given_arguments(node):
        alias = argument.alias_info
        if alias is not None and any(alias.before_set & names for names in shared):
            fx.map_arg(value, result.append)
    return result


@dataclass(eq=False)
class Cluster:
    """Nodes that may share a storage, and the operations that write it, both in the order of the graph."""

    members: list[fx.Node]
    writes: list[fx.Node] = field(default_factory=list)


def find_clusters(graph: fx.Graph, root: nn.Module) -> dict[fx.Node, Cluster]:
    """The cluster of each node."""
    cluster_of = {node: Cluster([node]) for node in graph.nodes}
    for node in graph.nodes:
        for other in aliased(node):
            joined, own = cluster_of[other], cluster_of[node]
            if own is not joined:
                joined.members += own.members
                cluster_of.update(dict.fromkeys(own.members, joined))
    for cluster in set(cluster_of.values()):
        cluster.members.sort()
    for node in graph.nodes:
        for cluster in {cluster_of[other] for other in written(node, root)}:
            cluster.writes.append(node)
    return cluster_of


def functionalise(trace: Trace) -> None:
    """Replace in-place operations by out-of-place ones where the result is the same."""
    clusters = find_clusters(trace.graph, trace.root)
    for node in trace.nodes():
        replacement = _out_of_place(node, trace)
        if replacement is None:
            continue
        members = clusters[node].members
        if any(trace.kind(member) in (Kind.BUFFER, Kind.PARAMETER) for member in members):
            continue
        newer = {node}
        for member in members:
            if member is not node and any(other in newer for other in aliased(member)):
                newer.add(member)
        older = [member for member in members if member not in newer]
        if all(user <= node for member in older for user in member.users):
            node.target = replacement


def _out_of_place(node: fx.Node, trace: Trace) -> torch._ops.OpOverload | None:
    """The operator without its trailing underscore, if it computes the same."""
    target = node.target
    name = operator_name(node)
    if not isinstance(target, torch._ops.OpOverload) or not name.endswith("_") or name.startswith("_"):
        return None
    if torch.Tag.nondeterministic_seeded in target.tags or len(written(node, trace.root)) != 1:
        return None
    packet = getattr(getattr(torch.ops, target.namespace), name[:-1], None)
    replacement = getattr(packet, target._overloadname, None) if packet is not None else None
    if replacement is None:
        return None
    if [a.name for a in replacement._schema.arguments] != [a.name for a in target._schema.arguments]:
        return None
    # x.add_(y) keeps the type of x, x + y promotes it
    if torch.Tag.pointwise in target.tags and name != "masked_fill_":
        dtypes = {trace.specs[arg].dtype for arg in node.all_input_nodes if arg in trace.specs}
        if len(dtypes) > 1:
            return None
    return replacement


def protect_fields(trace: Trace) -> None:
    """Let in-place writes into the raw batch go to a copy of it."""
    clusters = find_clusters(trace.graph, trace.root)
    first = next(trace.nodes())
    for node in trace.inputs:
        if trace.kind(node) not in (Kind.FIELD, Kind.CONSTANT) or not clusters[node].writes:
            continue
        with trace.graph.inserting_before(first):
            copy = trace.graph.call_function(torch.ops.aten.clone.default, (node,))
        trace.specs[copy] = trace.specs[node]
        for user in [user for user in node.users if user is not copy]:
            user.replace_input_with(node, copy)


def alive_nodes(trace: Trace) -> set[fx.Node]:
    """What the loss or a buffer's new value needs, with writes into storage that is read."""
    clusters = find_clusters(trace.graph, trace.root)
    buffers = [node for node in trace.inputs if trace.kind(node) is Kind.BUFFER]
    pending = [trace.loss, *(write for buffer in buffers for write in clusters[buffer].writes)]
    alive: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node in alive:
            continue
        alive.add(node)
        pending += node.all_input_nodes
        pending += clusters[node].writes
    return alive


def prune(trace: Trace) -> None:
    """Erase what neither the loss nor a buffer's new value needs; keep writes into storage that is read."""
    alive = alive_nodes(trace)
    for node in reversed(list(trace.graph.nodes)):
        if node not in alive and node.op != "output":
            trace.graph.erase_node(node)
            trace.inputs.pop(node, None)
            trace.specs.pop(node, None)
