"""The time of an operation by a roofline: by its flops or by the bytes that it moves, whichever takes longer.

    seconds     \\             /  flops over the peak of its type
                 \\___________/   bytes over the bandwidth

The default partition weighs blocks by it. By flops alone norms, rotations and the softmax over a vocabulary would be
free: of Qwen3-0.6B (8 x 512 tokens, bf16, run eagerly on an H200) the head has the flops of 8.7 layers and takes as
long as 4.8. Only ratios matter: they are those of a data-centre card. For a CPU they are a little off: on two cores the
demo is 2 to 5 % slower as [5, 4], which they give, than as [6, 3].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import fx

from vpipe.graph.inplace import operator_name
from vpipe.graph.trace import Trace

PEAK = {1: 1200e12, 2: 700e12, 4: 50e12, 8: 30e12}
"""Flops a second of matrix products that a card reaches, by the bytes of a number."""
ATTENTION = 0.3
"""Share of the peak that attention reaches."""
BANDWIDTH = 4e12
"""Bytes a second."""
EAGER, FUSED = 1.8, 0.5
"""Bytes that an elementwise operation moves, in units of its inputs and its result: run eagerly, its backward adds up
the gradients of several readers, and casts and slices have kernels of their own; compiled, most stay on the chip."""
IN_PIECES = 0.5
"""The same of the loss of a head in pieces: all of them without a kernel of its own, a quarter with it (H200)."""
UNIT = 1e-15
"""Seconds of which a weight counts whole ones."""
# They make a tensor as large as their input, which the backward reads, and return one number.
_LOSSES = {
    "cross_entropy_loss", "nll_loss", "nll_loss_nd", "binary_cross_entropy_with_logits", "mse_loss", "kl_div",
}  # fmt: skip


class Weight(NamedTuple):
    """The time of a forward in units; a backward takes about twice as long, whatever it is."""

    eager: int = 0
    compiled: int = 0

    def __add__(self, other: Weight) -> Weight:  # type: ignore[override]
        return Weight(self.eager + other.eager, self.compiled + other.compiled)


def operation_weight(node: fx.Node, trace: Trace, flops: int) -> Weight:
    """That of an operation with so many flops."""
    read = [arg for arg in node.all_input_nodes if arg in trace.specs]
    if _is_view(node, read, trace):
        return Weight()
    moving = _moved_bytes(node, read, trace) / BANDWIDTH
    in_pieces = any(node in head.nodes for head in trace.heads)
    if in_pieces:
        moving *= IN_PIECES
    if flops or in_pieces or operator_name(node) in _LOSSES:
        widths = [trace.specs[arg].dtype.itemsize for arg in (*read, node) if arg in trace.specs]
        computing = flops / PEAK[min(8, max(widths, default=4))]
        if operator_name(node) == "scaled_dot_product_attention":
            computing /= ATTENTION
        alone = round(max(computing, moving) / UNIT)
        return Weight(alone, alone)
    return Weight(round(EAGER * moving / UNIT), round(FUSED * moving / UNIT))


def _moved_bytes(node: fx.Node, read: list[fx.Node], trace: Trace) -> int:
    moved = sum(map(trace.num_bytes, read)) + (trace.num_bytes(node) if node in trace.specs else 0)
    return moved + trace.num_bytes(read[0]) if operator_name(node) in _LOSSES else moved


def _is_view(node: fx.Node, read: list[fx.Node], trace: Trace) -> bool:
    """Whether the result is the argument's memory; a cast is not."""
    if node.op == "call_function" and not isinstance(node.target, torch._ops.OpOverload):
        return getattr(node.target, "__name__", "") == "getitem"
    if not isinstance(node.target, torch._ops.OpOverload) or node not in trace.specs or not read:
        return False
    returned = node.target._schema.returns[0].alias_info
    same = trace.specs[read[0]].dtype == trace.specs[node].dtype
    return returned is not None and not returned.is_write and same
