"""The model's output, beside the loss: which values of the graph it is made of, and how.

    values (owned by stages) ──▶ epilogue (operations that only the output needs, such as an argmax) ──▶ output

Training computes nothing of the epilogue. Whoever wants the output fetches the values and runs it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from vpipe.errors import VPipeError
from vpipe.graph.inplace import alive_nodes, find_clusters
from vpipe.graph.trace import Kind, Trace

_PLAIN = (bool, int, float, str, type(None))
_TENSOR = object()
"""Stands for a tensor among the leaves."""


class OutputForm:
    """The form of an output: its structure, and which of its leaves are tensors; other leaves are constants."""

    def __init__(self, output: Any) -> None:
        leaves, self._spec = pytree.tree_flatten(_as_tree(output))
        self._tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._leaves = [_constant(leaf) for leaf in leaves]

    def take_tensors(self) -> list[Tensor]:
        """The tensors, once: those of a capture are fake, and not to be kept."""
        tensors, self._tensors = self._tensors, []
        return tensors

    def written(self) -> dict[str, Any]:
        """As JSON; `read` reads it."""
        leaves = [{"tensor": True} if leaf is _TENSOR else leaf for leaf in self._leaves]
        return {"structure": pytree.treespec_dumps(self._spec), "leaves": leaves}

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> OutputForm:
        form = cls(None)
        form._spec = pytree.treespec_loads(values["structure"])
        form._leaves = [_TENSOR if isinstance(leaf, dict) else leaf for leaf in values["leaves"]]
        return form

    def fill(self, tensors: list[Tensor | None]) -> Any:
        remaining = iter(tensors)
        leaves = [next(remaining) if leaf is _TENSOR else leaf for leaf in self._leaves]
        return pytree.tree_unflatten(leaves, self._spec)


def _constant(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return _TENSOR
    return leaf if isinstance(leaf, _PLAIN) else None


def _as_tree(output: Any) -> Any:
    """A dataclass that torch does not know as a structure becomes a dict."""
    known = type(output) in pytree.SUPPORTED_NODES
    if dataclasses.is_dataclass(output) and not isinstance(output, type) and not known:
        return {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    return output


class ModelOutput:
    """How the output is made of `values` (names of operations that stages own) and fields of the batch."""

    def __init__(self, trace: Trace, leaves: list[fx.Node], form: OutputForm) -> None:
        """Call it before the graph is pruned: what only the output needs is copied from there."""
        self._form = form
        self._trace = trace
        alive = alive_nodes(trace)
        clusters = find_clusters(trace.graph, trace.root)
        needed: set[fx.Node] = set()  # to be computed in the epilogue
        sources: set[fx.Node] = set()
        self._missing: list[bool] = []
        for leaf in leaves:
            own, read = self._closure(leaf, alive, clusters)
            unknown = any(
                trace.kind(node) in (Kind.PARAMETER, Kind.BUFFER) or node.op == "get_attr" for node in read
            )
            self._missing.append(unknown)
            if not unknown:
                needed |= own
                sources |= read
        self.values = [node for node in trace.graph.nodes if node in sources and node not in trace.inputs]
        self._inputs = [node for node in trace.graph.nodes if node in sources]
        self._entries = [trace.inputs.get(node) for node in self._inputs]
        graph, copies = fx.Graph(), {}
        for node in self._inputs:
            copies[node] = graph.placeholder(node.name)
        for node in trace.graph.nodes:
            if node in needed:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(
            tuple(copies[leaf] for leaf, missing in zip(leaves, self._missing, strict=True) if not missing)
        )
        self._epilogue = fx.GraphModule({}, graph)

    def _closure(
        self, leaf: fx.Node, alive: set[fx.Node], clusters: Mapping[fx.Node, Any]
    ) -> tuple[set[fx.Node], set[fx.Node]]:
        """Operations to compute, and what they read; those of the loss that only need the batch are computed again."""
        own: set[fx.Node] = set()
        read: set[fx.Node] = set()
        pending = [leaf]
        while pending:
            node = pending.pop()
            if node in own or node in read:
                continue
            if (
                node in self._trace.inputs
                or node.op == "get_attr"
                or (node in alive and not self._of_batch(node))
            ):
                read.add(node)
                continue
            own.add(node)
            pending += [*node.all_input_nodes, *(w for w in clusters[node].writes if w not in alive)]
        return own, read

    def _of_batch(self, node: fx.Node) -> bool:
        """Whether it depends on the batch and on constants alone: no stage owns it."""
        pending, seen = [node], {node}
        while pending:
            each = pending.pop()
            kind = self._trace.kind(each)
            seeded = isinstance(each.target, torch._ops.OpOverload) and (
                torch.Tag.nondeterministic_seeded in each.target.tags
            )
            if (
                kind in (Kind.PARAMETER, Kind.BUFFER)
                or each.op == "get_attr"
                or seeded
                or each is self._trace.loss
            ):
                return False
            new = [arg for arg in each.all_input_nodes if arg not in seen]
            seen.update(new)
            pending += new
        return True

    def make(self, values: Mapping[str, Tensor], fields: Mapping[str, Tensor]) -> Any:
        """The output, from the values by name and the fields of the batch; None for what nothing computes."""
        arguments = []
        for node, entry in zip(self._inputs, self._entries, strict=True):
            if entry is None:
                arguments.append(values[node.name])
            else:
                arguments.append(
                    fields[entry.name] if entry.kind is Kind.FIELD else self._trace.constants[entry.name]
                )
        if all(self._missing) and self._missing:
            raise VPipeError(
                "the model's output cannot be computed: it needs parameters that the loss does not depend on; let the "
                "model return what its loss is computed from"
            )
        with torch.no_grad():
            made = iter(self._epilogue(*arguments))
        return self._form.fill([None if missing else next(made) for missing in self._missing])
