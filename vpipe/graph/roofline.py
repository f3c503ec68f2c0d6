"""The time of an operation by a roofline: by its flops or by the bytes that it moves, whichever takes longer.

    seconds     \\             /  flops over the peak of its type
                 \\___________/   bytes over the bandwidth

The default partition weighs blocks by it. By flops alone norms, rotations and the softmax over a vocabulary would be
free: of Qwen3-0.6B (8 x 512 tokens, bf16, run eagerly on an H200) the head has the flops of 8.7 layers and takes as
long as 4.8. Only ratios matter: they are those of a data-centre card, or of one core of a server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import fx

from vpipe.graph.inplace import operator_name
from vpipe.graph.trace import Trace


class Roofline(NamedTuple):
    peak: Mapping[int, float]
    """Flops a second of matrix products, by the bytes of a number."""
    bandwidth: float
    """Bytes a second."""
    eager: float
    fused: float
    """Bytes that an elementwise operation moves, in units of its inputs and its result: run eagerly, its backward adds
    up the gradients of several readers, and casts and slices have kernels of their own; compiled, most stay on the
    chip."""
    loss: float
    """The same of a loss."""
    loss_in_pieces: float
    """The same of the loss of a head in pieces: all of them without a kernel of its own, a quarter with it (H200)."""


GPU = Roofline(
    {1: 1200e12, 2: 700e12, 4: 50e12, 8: 30e12}, 4e12, eager=1.8, fused=0.5, loss=1.0, loss_in_pieces=0.5
)
# The demo on one core: products at 60 GFLOP/s; small tensors stay in caches; exponentials take longer than moving.
CPU = Roofline({1: 60e9, 2: 60e9, 4: 60e9, 8: 30e9}, 12e9, eager=1.0, fused=1.0, loss=3.0, loss_in_pieces=3.0)
ATTENTION = 0.3
"""Share of the peak that attention reaches."""
UNIT = 1e-15
"""Seconds of which a weight counts whole ones."""
# They make a tensor as large as their input, which the backward reads, and return one number.
_LOSSES = {
    "cross_entropy_loss", "nll_loss", "nll_loss_nd", "binary_cross_entropy_with_logits", "mse_loss", "kl_div",
}  # fmt: skip


class Weight(NamedTuple):
    """The time of a forward in units, on a GPU and on a CPU; a backward takes about twice as long, whatever it is."""

    eager: int = 0
    compiled: int = 0
    cpu: int = 0

    def __add__(self, other: Weight) -> Weight:  # type: ignore[override]
        return Weight(self.eager + other.eager, self.compiled + other.compiled, self.cpu + other.cpu)


def operation_weight(node: fx.Node, trace: Trace, flops: int) -> Weight:
    """That of an operation with so many flops."""
    read = [arg for arg in node.all_input_nodes if arg in trace.specs]
    if _is_view(node, read, trace):
        return Weight()
    moved = _moved_bytes(node, read, trace)
    in_pieces = any(node in head.nodes for head in trace.heads)
    is_loss = operator_name(node) in _LOSSES
    if not (flops or in_pieces or is_loss):
        kinds = ((GPU, GPU.eager), (GPU, GPU.fused), (CPU, CPU.eager))
        return Weight(*(round(factor * moved / line.bandwidth / UNIT) for line, factor in kinds))
    widths = [trace.specs[arg].dtype.itemsize for arg in (*read, node) if arg in trace.specs]
    share = ATTENTION if operator_name(node) == "scaled_dot_product_attention" else 1.0
    found = []
    for line in (GPU, CPU):
        factor = line.loss_in_pieces if in_pieces else line.loss if is_loss else 1.0
        computing = flops / line.peak[min(8, max(widths, default=4))] / share
        found.append(round(max(computing, factor * moved / line.bandwidth) / UNIT))
    return Weight(found[0], *found)


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
