"""Floating-point operations of a node's matrix products, in one forward."""

from __future__ import annotations

import math

from torch import fx

from vpipe.graph.inplace import operator_name
from vpipe.graph.opaque import ModuleCall
from vpipe.graph.trace import Trace, submodules

_ROWS_BY_COLUMNS = {"mm", "matmul", "bmm", "dot", "mv", "_grouped_mm", "grouped_mm_fallback"}
_BIASED_PRODUCTS = {"addmm", "baddbmm", "addmv"}
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}


def count_flops(node: fx.Node, trace: Trace) -> int:
    """Twice the multiplications of a matrix product, convolution, attention or recurrence; else zero."""
    if isinstance(node.target, ModuleCall):
        return _opaque(node, trace)
    bodies = submodules(node, trace.root)
    if bodies:
        return sum(_inside(inner) for body in bodies for inner in body.graph.nodes)
    name = operator_name(node)
    shapes = [trace.hinted_shape(arg) for arg in node.args if isinstance(arg, fx.Node) and arg in trace.specs]
    if name in _RECURRENT:
        tokens = math.prod(shapes[0][:-1])
        return (
            2 * tokens * sum(trace.num_elements(w) for w in _weights(node) if len(trace.hinted_shape(w)) > 1)
        )
    if node not in trace.specs:
        return 0
    result = trace.num_elements(node)
    if name == "linear":
        return 2 * result * shapes[1][-1]
    if name in _ROWS_BY_COLUMNS:
        return 2 * result * shapes[0][-1]
    if name in _BIASED_PRODUCTS:
        return 2 * result * shapes[1][-1]
    if name.startswith("conv_transpose"):
        return 2 * math.prod(shapes[0]) * math.prod(shapes[1][1:])
    if name.startswith("conv") and name.rstrip("123d") in ("conv", "convolution"):
        return 2 * result * math.prod(shapes[1][1:])
    if name == "scaled_dot_product_attention":
        query, key, value = shapes[:3]
        return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    if name == "einsum":
        return _einsum(node, trace)
    return 0


def _weights(node: fx.Node) -> list[fx.Node]:
    """The flat list of weights that a recurrent operator takes as its third argument."""
    weights = node.args[2]
    return [w for w in weights if isinstance(w, fx.Node)] if isinstance(weights, list | tuple) else []


def _einsum(node: fx.Node, trace: Trace) -> int:
    equation, operands = node.args[0], node.args[1]
    assert isinstance(equation, str)
    assert isinstance(operands, list | tuple)
    terms = equation.replace(" ", "").split("->")[0].split(",")
    sizes: dict[str, int] = {}
    for term, operand in zip(terms, operands, strict=True):
        if "." in term or not isinstance(operand, fx.Node):
            return 2 * trace.num_elements(node)
        sizes.update(zip(term, trace.hinted_shape(operand), strict=True))
    return 2 * math.prod(sizes.values()) if len(terms) > 1 else 0


def _inside(node: fx.Node) -> int:
    """A product inside no_grad or autocast: judged by its result alone, for these are small."""
    value = node.meta.get("val")
    if operator_name(node) not in _ROWS_BY_COLUMNS | {"linear"} or value is None:
        return 0
    return 2 * math.prod(size if isinstance(size, int) else 1 for size in value.shape)


def _opaque(node: fx.Node, trace: Trace) -> int:
    """As if every parameter of the module met every row of its input once."""
    weights = [arg for arg in node.args[1:] if isinstance(arg, fx.Node)]
    first = next((arg for arg in node.all_input_nodes if arg in trace.specs and arg not in weights), None)
    rows = math.prod(trace.hinted_shape(first)[:-1]) if first is not None else 1
    return 2 * rows * sum(trace.num_elements(weight) for weight in weights)
