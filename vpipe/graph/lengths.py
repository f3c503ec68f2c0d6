"""Lengths that the exporter fixes though the model does not: found, and freed, by capturing with other lengths.

`torch.export` follows an LSTM step by step, so it fixes the length of the example, but the operation that it leaves in
the graph takes any. If captures with other lengths give the same graph, and every size and number in it grows in
proportion, the length is free after all. Where the graph is another one (Mamba is unrolled over its length), the size
stays fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from vpipe.graph.trace import Kind, Size, Spec, Trace, submodules

SHORT = (8, 9), (10, 11)
"""Other lengths that are tried, without the example's: short ones, because every step of an LSTM is followed."""
MOST = 3
"""Different sizes that are tried."""

Fields = dict[str, Tensor]
Place = tuple[str, int]
"""A field of the batch, and a dimension."""


def free_lengths(
    trace: Trace, fields: Fields, images: Mapping[str, bool], again: Callable[[Fields], Trace]
) -> None:
    """Free the fixed sizes of the batch that need not be, and note those that only the exporter has fixed.

    `again` captures the model with other fields; it raises if the model does not take them.
    """
    for size, places in list(_fixed(trace, images).items())[:MOST]:
        short = next(pair for pair in SHORT if size not in pair)
        # The last one tells what grows with the length from what is rounded up to a multiple of something.
        captures = {size: trace}
        try:
            for other in (*short, size + 1):
                captures[other] = again(_resized(fields, images, size, other))
                if len(captures[other].graph.nodes) != len(trace.graph.nodes):
                    raise _DifferError
            _free(captures, places)
        except _DifferError:
            trace.unrolled |= dict.fromkeys(places, size)
        except Exception:
            continue  # the model needs this size


def _fixed(trace: Trace, images: Mapping[str, bool]) -> dict[int, list[Place]]:
    """The fixed sizes, but for those of images and for the number of samples; equal ones vary together."""
    found: dict[int, list[Place]] = {}
    for node, entry in trace.inputs.items():
        if entry.kind is Kind.FIELD and not images[entry.name]:
            for dimension, size in enumerate(trace.specs[node].shape):
                if dimension and isinstance(size, int) and size > 1:
                    found.setdefault(size, []).append((entry.name, dimension))
    return found


def _resized(fields: Fields, images: Mapping[str, bool], size: int, other: int) -> Fields:
    """The fields with every dimension of this size as long as the other; one tensor for two fields stays one."""
    index = torch.arange(other) % size
    made: dict[int, Tensor] = {}
    for name, field in fields.items():
        if id(field) not in made:
            resized = field
            for dimension in range(1, 0 if images[name] else field.ndim):
                if field.shape[dimension] == size:
                    resized = resized.index_select(dimension, index.to(field.device))
            made[id(field)] = resized
    return {name: made[id(field)] for name, field in fields.items()}


def _free(captures: Mapping[int, Trace], places: list[Place]) -> None:
    """Give the size of the first capture a symbol, in all shapes and numbers that grow with it."""
    (size, trace), *_ = captures.items()
    symbol = sympy.Symbol(f"length{len(trace.symbols)}", positive=True, integer=True)
    traces = tuple(captures.values())
    number = {node: i for each in traces for i, node in enumerate(each.graph.nodes)}
    grow = partial(_grown, symbol, tuple(captures))
    arguments: dict[fx.Node, Any] = {}
    specs: dict[fx.Node, Spec] = {}
    for nodes in zip(*(each.graph.nodes for each in traces), strict=True):
        node = nodes[0]
        _same(*(_operation(each, one) for each, one in zip(traces, nodes, strict=True)))
        arguments[node] = _for_any(grow, number, *((one.args, dict(one.kwargs)) for one in nodes))
        if node in trace.specs:
            shapes = [_shape(each, one, trace) for each, one in zip(traces, nodes, strict=True)]
            sizes = [grow(*each) for each in zip(*shapes, strict=True)]
            specs[node] = Spec(tuple(sizes), trace.specs[node].dtype)
    trace.specs |= specs
    trace.symbols[symbol], trace.hints[symbol] = places[0], size
    trace.bounds = {**trace.bounds, symbol: (1, None)}
    _set_arguments(trace, symbol, arguments)


class _DifferError(Exception):
    """The graphs of two lengths compute something else."""


def _same(first: Any, *others: Any) -> None:
    if any(other != first for other in others):
        raise _DifferError


def _operation(trace: Trace, node: fx.Node) -> tuple[Any, ...]:
    target = trace.inputs.get(node) or (node.target if node.op == "call_function" else "")
    return node.op, target, [body.code for body in submodules(node, trace.root)], node in trace.specs


def _for_any(grow: Callable[..., Size], number: Mapping[fx.Node, int], first: Any, *others: Any) -> Any:
    """The arguments of a node for any length: the first's, with expressions for numbers that grow with it."""
    _same(*map(type, (first, *others)))
    if isinstance(first, fx.Node):
        _same(*(number[node] for node in (first, *others)))
        return first
    if isinstance(first, list | tuple):
        _same(*map(len, (first, *others)))
        parts = [_for_any(grow, number, *each) for each in zip(first, *others, strict=True)]
        return parts if isinstance(first, list) else tuple(parts)
    if isinstance(first, dict):
        _same(*map(list, (first, *others)))
        return {key: _for_any(grow, number, first[key], *(o[key] for o in others)) for key in first}
    if isinstance(first, int) and not isinstance(first, bool):
        return grow(first, *others)
    _same(first, *others)
    return first


def _set_arguments(trace: Trace, symbol: sympy.Symbol, arguments: Mapping[fx.Node, Any]) -> None:
    """Where an argument is an expression, compute it from the size of the field."""
    name, dimension = trace.symbols[symbol]
    (field,) = (node for node, entry in trace.inputs.items() if entry == (Kind.FIELD, name))
    first = next(trace.nodes())
    made: dict[sympy.Expr, fx.Node] = {}

    def node_of(expression: sympy.Expr) -> fx.Node:
        if expression not in made:
            with trace.graph.inserting_before(first):
                size = fx.Proxy(trace.graph.call_function(torch.ops.aten.sym_size.int, (field, dimension)))
                value = sympy_interp(PythonReferenceAnalysis, {symbol: size}, expression)
            made[expression] = value.node
        return made[expression]

    def replaced(given: Any) -> Any:
        if isinstance(given, list | tuple):
            parts = [replaced(part) for part in given]
            return parts if isinstance(given, list) else tuple(parts)
        if isinstance(given, dict):
            return {key: replaced(value) for key, value in given.items()}
        return node_of(given) if isinstance(given, sympy.Expr) else given

    for node, given in arguments.items():
        if node.op == "call_function":
            node.args, node.kwargs = replaced(given)


def _grown(symbol: sympy.Symbol, lengths: tuple[int, ...], *sizes: Size) -> Size:
    """The size for any length, from those for some, of which the second and the third differ by one."""
    rate = sizes[2] - sizes[1]
    grown = sympy.expand(sizes[1] + rate * (symbol - lengths[1]))
    if any(
        sympy.expand(grown.subs(symbol, length) - size) != 0
        for length, size in zip(lengths, sizes, strict=True)
    ):
        raise _DifferError
    return int(grown) if grown.is_number else grown


def _shape(trace: Trace, node: fx.Node, first: Trace) -> tuple[Size, ...]:
    """The shape of a node, with the symbols of the first capture."""
    place_of = {place: symbol for symbol, place in first.symbols.items()}
    renamed = {symbol: place_of.get(place, symbol) for symbol, place in trace.symbols.items()}
    return tuple(s if isinstance(s, int) else s.subs(renamed) for s in trace.specs[node].shape)
