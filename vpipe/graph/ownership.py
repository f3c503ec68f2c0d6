"""Owned and free operations of a captured model.

*Free* operations depend only on the batch, on constants and on buffers that never change (masks, position ids, rotary
tables): each stage computes those that it reads. All others are *owned*: they run once, in one stage, and their results
are sent to their readers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import fx, nn

from vpipe.graph.inplace import Cluster, find_clusters, given_arguments, operator_name
from vpipe.graph.opaque import LossCall, ModuleCall
from vpipe.graph.trace import Kind, Trace, submodules

Clusters: TypeAlias = Mapping[fx.Node, Cluster]
_NOT_DIFFERENTIABLE = {"detach", "detach_", "zeros_like", "ones_like", "empty_like", "full_like", "sign"}


class Ownership:
    """The owned operations in order, the clusters of shared storage, and which values carry a gradient.

    `mutated` are the buffers that the model changes.
    """

    def __init__(self, trace: Trace) -> None:
        self.clusters = find_clusters(trace.graph, trace.root)
        self.mutated = frozenset(
            node for node in trace.inputs if trace.kind(node) is Kind.BUFFER and self.clusters[node].writes
        )
        self.owned = _owned(trace, self.clusters, self.mutated)
        self.differentiable = _differentiable(trace, self.clusters)


def _owned(trace: Trace, clusters: Clusters, mutated: frozenset[fx.Node]) -> tuple[fx.Node, ...]:
    """The smallest set that contains the users of its members and all that share a written storage with them."""
    parameters = {node for node in trace.inputs if trace.kind(node) is Kind.PARAMETER}
    pending = [user for node in parameters | mutated for user in node.users]
    pending += [node for node in trace.nodes() if is_random(node, trace.root)]
    # The loss is owned even if no parameter reaches it.
    pending.append(trace.loss)
    owned: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node in owned or node.op in ("output", "placeholder"):
            continue
        owned.add(node)
        pending += node.users
        shared = [clusters[node]] if clusters[node].writes else []
        # Free operations run before owned ones: storage that is read here and written later cannot be free.
        reads = [clusters[read] for read in node.all_input_nodes]
        shared += [cluster for cluster in reads if any(write > node for write in cluster.writes)]
        for cluster in shared:
            pending += [*cluster.members, *cluster.writes]
    return tuple(sorted(owned))


def is_random(node: fx.Node, root: nn.Module) -> bool:
    """Whether the operation draws random numbers, given its arguments."""
    if isinstance(node.target, ModuleCall | LossCall):
        return True
    if any(is_random(inner, body) for body in submodules(node, root) for inner in body.graph.nodes):
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    values = bound_arguments(node)
    name = operator_name(node)
    if name == "scaled_dot_product_attention":
        return bool(values["dropout_p"])
    if "dropout" in values:  # recurrent networks: between layers only
        return bool(values["dropout"] and values["train"] and values.get("num_layers", 1) > 1)
    if "train" in values and "p" in values:
        return bool(values["train"] and values["p"])
    return True


def bound_arguments(node: fx.Node) -> dict[str, Any]:
    """The operator's arguments by name, defaults included."""
    assert isinstance(node.target, torch._ops.OpOverload)
    arguments = node.target._schema.arguments
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    return defaults | {argument.name: value for argument, value in given_arguments(node)}


def _differentiable(trace: Trace, clusters: Clusters) -> frozenset[fx.Node]:
    """Values that carry a gradient: floating and made from a parameter that is trained."""
    result = {
        node
        for node, entry in trace.inputs.items()
        if entry.kind is Kind.PARAMETER and entry.name not in trace.frozen
    }
    # Repeated while a write passes a gradient to an older name of its storage.
    size = -1
    while size != len(result):
        size = len(result)
        for node in trace.nodes():
            if any(source in result for source in node.all_input_nodes) and _may_carry_gradient(node, trace):
                result.add(node)
        for cluster in set(clusters.values()):
            if any(write in result for write in cluster.writes):
                result.update(member for member in cluster.members if member not in trace.inputs)
    return frozenset(result)


def _may_carry_gradient(node: fx.Node, trace: Trace) -> bool:
    no_grad = node.target is torch.ops.higher_order.wrap_with_set_grad_enabled and node.args[0] is False
    if no_grad or operator_name(node) in _NOT_DIFFERENTIABLE:
        return False
    spec = trace.specs.get(node)
    return spec is None or spec.dtype.is_floating_point or spec.dtype.is_complex
