"""Blocks: the stretches of a model between its cheapest cuts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx

from vpipe.graph.cuts import CutOrder, candidate_cuts
from vpipe.graph.flops import count_flops
from vpipe.graph.ownership import Ownership
from vpipe.graph.trace import Kind, Trace, module_path


@dataclass(frozen=True)
class Block:
    """A stretch of the model that is never cut.

    `flops` are those of one forward of the example batch, `cut_bytes` what lives across the cut behind the
    block (0 for the last). A tied parameter counts in each block that uses it.
    """

    index: int
    name: str
    parameters: tuple[str, ...]
    num_parameters: int
    flops: int
    cut_bytes: int
    nodes: tuple[fx.Node, ...] = field(repr=False)


# Share of an ordinary piece's flops (their lower quartile) up to which a piece is no block of its own.
_LIGHT = 0.6


@dataclass
class _Piece:
    """Positions start..end of the owned operations, and the modules of its matrix products in order."""

    start: int
    end: int
    flops: int
    paths: list[tuple[str, ...]]


def find_blocks(trace: Trace, ownership: Ownership) -> tuple[Block, ...]:
    """The model's blocks: what has no matrix product worth mentioning belongs to a neighbour."""
    flops = [count_flops(node, trace) for node in ownership.owned]
    order = CutOrder.of(trace, ownership, flops)
    cuts = candidate_cuts(trace, order)
    starts = [0, *(cut + 1 for cut in cuts)]
    ends = [*cuts, len(order.nodes) - 1]
    paths = [module_path(node) for node in order.nodes]
    pieces = [
        _Piece(a, b, sum(flops[a : b + 1]), [paths[i] for i in range(a, b + 1) if flops[i]])
        for a, b in zip(starts, ends, strict=True)
    ]
    _merge(pieces, 0, order, paths)
    before = 0
    while before != len(pieces) > 1:
        before = len(pieces)
        quartile = statistics.quantiles([piece.flops for piece in pieces], n=4, method="inclusive")[0]
        _merge(pieces, _LIGHT * quartile, order, paths)
    names = _names([piece.paths or paths[piece.start : piece.end + 1] for piece in pieces])
    return tuple(
        _block(index, name, piece, order, trace)
        for index, (name, piece) in enumerate(zip(names, pieces, strict=True))
    )


def _merge(pieces: list[_Piece], limit: float, order: CutOrder, paths: Sequence[tuple[str, ...]]) -> None:
    """Merge pieces of up to `limit` flops with a neighbour, the lightest first."""
    while len(pieces) > 1:
        light = [i for i, piece in enumerate(pieces) if piece.flops <= limit]
        if pieces[-1].flops and len(pieces) - 1 in light and not _cuts_head(pieces):
            light.remove(len(pieces) - 1)  # the head: small or not, it stands alone
        if not light:
            return
        index = min(light, key=lambda i: pieces[i].flops)
        left = index - 1 if _goes_left(pieces, index, order, paths) else index
        a, b = pieces[left], pieces[left + 1]
        pieces[left : left + 2] = [_Piece(a.start, b.end, a.flops + b.flops, a.paths + b.paths)]


def _goes_left(
    pieces: Sequence[_Piece], index: int, order: CutOrder, paths: Sequence[tuple[str, ...]]
) -> bool:
    """Whether a light piece joins the block before it: across the costlier cut, else the one inside a module."""
    if index in (0, len(pieces) - 1):
        return index > 0
    before, behind = pieces[index].start - 1, pieces[index].end
    left = (order.crossing[before], _shared(before, paths))
    right = (order.crossing[behind], _shared(behind, paths))
    return left > right


def _shared(cut: int, paths: Sequence[tuple[str, ...]]) -> int:
    """How many modules deep the two sides of a cut still share their place."""
    return len(_common([paths[cut], paths[cut + 1]]))


def _cuts_head(pieces: Sequence[_Piece]) -> bool:
    """Whether the last cut runs through a module of its own, not through the one that holds most of the model."""
    working = [piece for piece in pieces if piece.paths]
    around = _common([working[-2].paths[-1], working[-1].paths[0]]) if len(working) > 1 else ()
    inside = sum(piece.paths[0][: len(around)] == around for piece in working)
    return 2 * inside <= len(working)


def _common(paths: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    shortest, longest = min(paths), max(paths)
    length = 0
    while length < len(shortest) and shortest[length] == longest[length]:
        length += 1
    return shortest[:length]


def _names(paths: Sequence[Sequence[tuple[str, ...]]]) -> list[str]:
    """Readable names: the module around a block, and its parts where another block shares the module."""
    around = [_common(own) for own in paths]
    names: list[str] = []
    for index, prefix in enumerate(around):
        shared = any(
            other[: len(prefix)] == prefix for position, other in enumerate(around) if position != index
        )
        name = ".".join(prefix)
        parts = list(dict.fromkeys(path[len(prefix)] for path in paths[index] if len(path) > len(prefix)))
        if shared and parts:
            name = f"{name}/{'+'.join(parts)}" if name else "+".join(parts)
        names.append(name or f"block{index}")
    seen: dict[str, int] = {}
    unique = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        unique.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return unique


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
        cut_bytes=order.crossing[piece.end],
        nodes=nodes,
    )
