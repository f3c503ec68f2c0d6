"""Blocks: the parts of a model between its cheapest cuts, with their names and flops."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from torch import fx

from vpipe.graph.cuts import CutOrder, candidate_cuts
from vpipe.graph.inplace import operator_name
from vpipe.graph.opaque import ModuleCall
from vpipe.graph.ownership import Ownership
from vpipe.graph.roofline import Weight, operation_weight
from vpipe.graph.trace import Kind, Trace, submodules


@dataclass(frozen=True)
class Block:
    """Consecutive operations that always belong to one stage.

    `flops` are those of one forward of the example batch, `weight` its time by a roofline (`roofline.py`), `cut_bytes`
    the bytes that cross the cut behind the block (0 for the last). A tied parameter counts in each block that uses it.
    """

    index: int
    name: str
    parameters: tuple[str, ...]
    num_parameters: int
    flops: int
    weight: Weight
    cut_bytes: int
    nodes: tuple[fx.Node, ...] = field(repr=False)


# A piece with at most this share of the flops of an ordinary piece (their lower quartile) joins a neighbour.
_LIGHT = 0.6
_ROWS_BY_COLUMNS = {"mm", "matmul", "bmm", "dot", "mv", "_grouped_mm", "grouped_mm_fallback"}
_BIASED_PRODUCTS = {"addmm", "baddbmm", "addmv"}
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}


@dataclass
class _Piece:
    """Positions start..end of the owned operations, and the modules of its matrix products in order."""

    start: int
    end: int
    flops: int
    paths: list[tuple[str, ...]]


def find_blocks(trace: Trace, ownership: Ownership) -> tuple[Block, ...]:
    """The model's blocks. Pieces with few flops are merged into a neighbour."""
    flops = [count_flops(node, trace) for node in ownership.owned]
    order = CutOrder(trace, ownership, flops)
    pieces = _pieces(order, flops, candidate_cuts(trace, order))
    if len(pieces) == 1:  # narrow at both ends and small: the cheap cuts there leave nothing on one side
        pieces = _pieces(order, flops, candidate_cuts(trace, order, rules_out=False))
    names = _names([piece.paths or order.paths[piece.start : piece.end + 1] for piece in pieces])
    return tuple(
        _block(index, name, piece, order, trace)
        for index, (name, piece) in enumerate(zip(names, pieces, strict=True))
    )


def _pieces(order: CutOrder, flops: Sequence[int], cuts: Sequence[int]) -> list[_Piece]:
    """What lies between the cuts, light ones merged."""
    starts = [0, *(cut + 1 for cut in cuts)]
    ends = [*cuts, len(order.nodes) - 1]
    pieces = [
        _Piece(a, b, sum(flops[a : b + 1]), [order.paths[i] for i in range(a, b + 1) if flops[i]])
        for a, b in zip(starts, ends, strict=True)
    ]
    _merge(pieces, 0, order)
    before = 0
    while before != len(pieces) > 1:
        before = len(pieces)
        quartile = statistics.quantiles([piece.flops for piece in pieces], n=4, method="inclusive")[0]
        _merge(pieces, _LIGHT * quartile, order)
    return pieces


def _merge(pieces: list[_Piece], limit: float, order: CutOrder) -> None:
    """Merge pieces of up to `limit` flops with a neighbour, the lightest first."""
    while len(pieces) > 1:
        light = [i for i, piece in enumerate(pieces) if piece.flops <= limit]
        if pieces[-1].flops and len(pieces) - 1 in light and not _cuts_head(pieces):
            light.remove(len(pieces) - 1)  # the head is a block of its own, however small
        if not light:
            return
        index = min(light, key=lambda i: pieces[i].flops)
        left = index - 1 if _goes_left(pieces, index, order) else index
        a, b = pieces[left], pieces[left + 1]
        pieces[left : left + 2] = [_Piece(a.start, b.end, a.flops + b.flops, a.paths + b.paths)]


def _goes_left(pieces: Sequence[_Piece], index: int, order: CutOrder) -> bool:
    """Whether a light piece joins the block before it: it removes the cut that costs more, or is deeper in a module."""
    if index in (0, len(pieces) - 1):
        return index > 0
    before, behind = (
        (order.crossing[cut], len(_common(order.paths[cut : cut + 2])))
        for cut in (pieces[index].start - 1, pieces[index].end)
    )
    return before > behind


def _cuts_head(pieces: Sequence[_Piece]) -> bool:
    """Whether the last cut lies inside a small module, not in the one that holds most of the model."""
    working = [piece for piece in pieces if piece.paths]
    around = _common([working[-2].paths[-1], working[-1].paths[0]]) if len(working) > 1 else ()
    inside = sum(piece.paths[0][: len(around)] == around for piece in working)
    return 2 * inside <= len(working)


def _common(paths: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    pairs = zip(min(paths), max(paths), strict=False)
    return tuple(part for part, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _names(paths: Sequence[Sequence[tuple[str, ...]]]) -> list[str]:
    """Readable names: the module around a block, with its parts where another block is in the same module."""
    around = [_common(own) for own in paths]
    names: list[str] = []
    seen: Counter[str] = Counter()
    for index, prefix in enumerate(around):
        others = around[:index] + around[index + 1 :]
        name = ".".join(prefix)
        parts = list(dict.fromkeys(path[len(prefix)] for path in paths[index] if len(path) > len(prefix)))
        if parts and any(other[: len(prefix)] == prefix for other in others):
            name = f"{name}/{'+'.join(parts)}" if name else "+".join(parts)
        name = name or f"block{index}"
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return names


def _block(index: int, name: str, piece: _Piece, order: CutOrder, trace: Trace) -> Block:
    nodes = order.nodes[piece.start : piece.end + 1]
    used = dict.fromkeys(
        arg for node in nodes for arg in node.all_input_nodes if trace.kind(arg) is Kind.PARAMETER
    )
    return Block(
        index=index,
        name=name,
        parameters=tuple(trace.inputs[node].name for node in used),
        num_parameters=sum(trace.num_elements(node) for node in used),
        flops=piece.flops,
        weight=sum((operation_weight(node, trace, count_flops(node, trace)) for node in nodes), Weight()),
        cut_bytes=order.crossing[piece.end],
        nodes=nodes,
    )


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
        weights = node.args[2] if isinstance(node.args[2], list | tuple) else ()
        matrices = [w for w in weights if isinstance(w, fx.Node) and len(trace.hinted_shape(w)) > 1]
        return 2 * math.prod(shapes[0][:-1]) * sum(map(trace.num_elements, matrices))
    if node not in trace.specs:
        return 0
    result = trace.num_elements(node)
    if name in _ROWS_BY_COLUMNS:
        return 2 * result * shapes[0][-1]
    if name == "linear" or name in _BIASED_PRODUCTS:
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
    """A product inside no_grad or autocast, estimated from its result's size: these are small."""
    value = node.meta.get("val")
    if operator_name(node) not in _ROWS_BY_COLUMNS | {"linear"} or value is None:
        return 0
    return 2 * math.prod(size if isinstance(size, int) else 1 for size in value.shape)


def _opaque(node: fx.Node, trace: Trace) -> int:
    """An estimate: every parameter of the module is multiplied with every row of its input once."""
    weights = [arg for arg in node.args[1:] if isinstance(arg, fx.Node)]
    first = next((arg for arg in node.all_input_nodes if arg in trace.specs and arg not in weights), None)
    rows = math.prod(trace.hinted_shape(first)[:-1]) if first is not None else 1
    return 2 * rows * sum(trace.num_elements(weight) for weight in weights)
