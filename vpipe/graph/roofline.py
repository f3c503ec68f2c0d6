"""The time of an operation by a roofline: by its flops or by the bytes that it moves, whichever takes longer.

    seconds     \\             /  flops over the peak of its type
                 \\___________/   bytes over the bandwidth

The default partition weighs blocks by it. By flops alone a softmax over a vocabulary, norms and embeddings would be
free. Only ratios matter: they are those of a data-centre card, and a core's in float32 are not far from them.
"""

from __future__ import annotations

import torch
from torch import fx

from vpipe.graph.inplace import operator_name
from vpipe.graph.trace import Trace

PEAK = {1: 1200e12, 2: 700e12, 4: 50e12, 8: 30e12}
"""Flops a second of matrix products that a card reaches, by the bytes of a number."""
BANDWIDTH = 4e12
"""Bytes a second."""
UNIT = 1e-15
"""Seconds of which a weight counts whole ones."""
# They make a tensor as large as their input, which the backward reads, and return one number.
_LOSSES = {
    "cross_entropy_loss",
    "nll_loss",
    "nll_loss_nd",
    "binary_cross_entropy_with_logits",
    "mse_loss",
    "kl_div",
}


def operation_weight(node: fx.Node, trace: Trace, flops: int) -> int:
    """The forward of an operation with so many flops; a backward takes about twice as long, whatever it is."""
    read = [arg for arg in node.all_input_nodes if arg in trace.specs]
    widths = [trace.specs[arg].dtype.itemsize for arg in (*read, node) if arg in trace.specs]
    moved = 0 if _is_view(node, read, trace) else _moved_bytes(node, read, trace)
    computing = flops / PEAK[min(8, max(widths, default=4))]
    return round(max(computing, moved / BANDWIDTH) / UNIT)


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
