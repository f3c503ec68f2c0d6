"""The heads of a captured model: a product with a vocabulary's weight and the cross-entropy of its result.

    linear(hidden, weight)  ──▶  casts, views, a shift by one token, a scale, a soft cap  ──▶  cross-entropy

Where the vocabulary is large, a stage computes the two in pieces (`stage/head_loss.py`), unless somebody else reads the
logits. The graph stays as it was captured: it is what the output, the targets and the blocks are read from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from vpipe.graph.inplace import operator_name
from vpipe.graph.ownership import bound_arguments
from vpipe.graph.trace import Trace

LARGE = 4
"""A vocabulary is large if it is at least so many times as large as a hidden state."""
MANY = 2**26
"""Logits of a minibatch in float32 or float64 that are worth computing them twice."""
_REDUCTIONS = {1: True, 2: False}
"""torch's number of a reduction: whether it is the mean."""
_CASTS = {"to", "_to_copy", "float", "contiguous", "clone", "alias"}
VIEWS = {"view", "reshape", "_unsafe_view"}


class Head(NamedTuple):
    """`nodes` are computed together; the other fields are what that needs.

    `size` is that of a hidden state. `moves` are the operations that rearrange the tokens, as functions of the logits,
    in order. The logits of the loss are those of the product times `scale`; with a `cap` c they are c tanh(logits).
    """

    nodes: frozenset[fx.Node]
    hidden: fx.Node
    size: int
    weight: fx.Node
    bias: fx.Node | None
    moves: tuple[fx.Node, ...]
    target: fx.Node
    loss: fx.Node
    scale: float
    cap: float | None
    smoothing: float
    ignored: int
    mean: bool
    dtype: torch.dtype
    """Of the logits that the loss reads."""


def find_heads(trace: Trace) -> tuple[Head, ...]:
    """Those of large vocabularies whose logits are more than their weight, for the example batch."""
    found = (_head(node, trace) for node in trace.nodes())
    return tuple(head for head in found if head is not None and _is_large(head, trace))


def _is_large(head: Head, trace: Trace) -> bool:
    """Whether pieces need less memory: in half precision they keep a gradient of the weight in place of the logits."""
    classes, tokens = trace.hinted_shape(head.weight)[0], trace.num_elements(head.target)
    many = tokens >= head.size if trace.specs[head.weight].dtype.itemsize == 2 else tokens * classes >= MANY
    return classes >= LARGE * head.size and many


def _head(loss: fx.Node, trace: Trace) -> Head | None:
    """The head that ends in this operation, if it is a loss."""
    if operator_name(loss) not in ("cross_entropy_loss", "nll_loss", "nll_loss_nd"):
        return None
    given = bound_arguments(loss)
    target, node = given["target"], given["self"]
    if given["weight"] is not None or given["reduction"] not in _REDUCTIONS:
        return None
    if not isinstance(target, fx.Node) or trace.specs[target].dtype.is_floating_point:
        return None
    chain = _Chain(trace, needs_logs=operator_name(loss) != "cross_entropy_loss")
    while operator_name(node) != "linear":
        if not chain.follows(node):
            return None
        node = node.args[0]
    product = bound_arguments(node)
    shape = trace.specs[product["weight"]].shape
    if not (chain.takes(node) and chain.ends(given["self"]) and isinstance(shape[1], int)):
        return None
    return Head(
        nodes=frozenset({loss, *chain.nodes}),
        hidden=product["input"],
        size=shape[1],
        weight=product["weight"],
        bias=product["bias"],
        moves=tuple(reversed(chain.moves)),
        target=target,
        loss=loss,
        scale=chain.scale,
        cap=chain.cap,
        smoothing=given.get("label_smoothing", 0.0),
        ignored=given["ignore_index"],
        mean=_REDUCTIONS[given["reduction"]],
        dtype=trace.specs[given["self"]].dtype,
    )


class _Chain:
    """The operations between a loss and the product before it, read backwards."""

    def __init__(self, trace: Trace, needs_logs: bool) -> None:
        """`needs_logs`: there must be a log-softmax among them."""
        self.trace = trace
        self.nodes: list[fx.Node] = []
        self.moves: list[fx.Node] = []
        self.scale = 1.0
        self.cap: float | None = None
        self._needs_logs = needs_logs
        self._transposed = False

    def takes(self, node: fx.Node) -> bool:
        """Whether nobody else reads the node."""
        self.nodes.append(node)
        return len(node.users) == 1

    def follows(self, node: fx.Node) -> bool:
        """Whether the operation is one that pieces can do as well."""
        name = operator_name(node)
        if not name or not self.takes(node) or not isinstance(node.args[0], fx.Node):
            return False
        given = bound_arguments(node)
        if name in _CASTS:
            return self.trace.specs[node].dtype.is_floating_point
        if name in ("transpose", "permute"):
            return self._transposes(node, given)
        if name in VIEWS or name in ("flatten", "slice"):
            return self._moves(node, name, given)
        if name == "log_softmax":
            return self._takes_logs(node, given)
        if self._needs_logs:
            return False  # something is done with the logarithms
        if name in ("mul", "div") and isinstance(given["other"], int | float) and given["other"]:
            self.scale *= given["other"] if name == "mul" else 1 / given["other"]
            return not given.get("rounding_mode")
        if name == "tanh" and self.cap is None:
            self.cap, self.scale = self.scale, 1.0
            return True
        return False

    def ends(self, logits: fx.Node) -> bool:
        """Whether this is a whole head: the second dimension of what the loss reads is that of the classes."""
        return not self._needs_logs and (self._transposed or len(self.trace.specs[logits].shape) == 2)

    def _takes_logs(self, node: fx.Node, given: Mapping[str, Any]) -> bool:
        dimensions = len(self.trace.specs[node].shape)
        needed, self._needs_logs = self._needs_logs, False
        return needed and given["dim"] % dimensions == dimensions - 1

    def _moves(self, node: fx.Node, name: str, given: Mapping[str, Any]) -> bool:
        """Views and slices leave the classes in the last dimension."""
        before, after = (self.trace.specs[each].shape for each in (node.all_input_nodes[0], node))
        self.moves.append(node)
        if name == "slice":
            return bool(given["dim"] % len(before) != len(before) - 1)
        return bool(before and after and before[-1] == after[-1])

    def _transposes(self, node: fx.Node, given: Mapping[str, Any]) -> bool:
        """Last of all, the classes may come to the second dimension."""
        dimensions = len(self.trace.specs[node].shape)
        first, self._transposed = not (self.moves or self._transposed), True
        if "dims" in given:
            order = [dim % dimensions for dim in given["dims"]]
            return first and order == [0, dimensions - 1, *range(1, dimensions - 1)]
        return first and dimensions == 3 and {given[name] % 3 for name in ("dim0", "dim1")} == {1, 2}
