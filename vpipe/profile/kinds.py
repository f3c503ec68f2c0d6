"""Kinds of blocks: those with the same operations on the same shapes cost the same, and are measured together."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import fx
from torch.fx.node import map_arg

from vpipe.graph import Block, ModelGraph
from vpipe.graph.trace import Kind, Trace


class Shape(NamedTuple):
    """A block seen from outside. Blocks of equal `kind` have inputs and outputs that correspond, one by one."""

    kind: str
    inputs: tuple[str, ...]
    """Values that it reads and did not make, in the order of their first use; parameters are not among them."""
    outputs: tuple[str, ...]
    """Values that other blocks read."""


def shapes(graph: ModelGraph) -> list[Shape]:
    return [_shape(block, graph.trace) for block in graph.blocks]


def _shape(block: Block, trace: Trace) -> Shape:
    own = {node: position for position, node in enumerate(block.nodes)}
    read: dict[fx.Node, int] = {}

    def text(node: fx.Node) -> str:
        if node in own:
            return f"%{own[node]}"
        known = node in read
        number = read.setdefault(node, len(read))
        return f"${number}" if known else f"${number}:{_described(node, trace)}"

    lines = [f"{_name(node, trace)} {map_arg((node.args, node.kwargs), text)}" for node in block.nodes]
    outputs = [node for node in block.nodes if _is_read_elsewhere(node, own)]
    lines.append(f"{map_arg(outputs, text)} loss {own.get(trace.loss)}")
    inputs = tuple(node.name for node in read if trace.kind(node) is None and node.op != "get_attr")
    return Shape("\n".join(lines), inputs, tuple(node.name for node in outputs))


def _is_read_elsewhere(node: fx.Node, own: dict[fx.Node, int]) -> bool:
    return any(user.op != "output" and user not in own for user in node.users)


def _described(node: fx.Node, trace: Trace) -> str:
    if node.op == "get_attr":
        return _name(node, trace)
    kind = trace.kind(node)
    trained = kind is Kind.PARAMETER and trace.inputs[node].name not in trace.frozen
    return " ".join(map(str, (kind, trained, *_sizes(node, trace))))


def _name(node: fx.Node, trace: Trace) -> str:
    """What the operation is: its operator, or the code of a graph that it wraps."""
    if node.op == "get_attr":
        return getattr(trace.root.get_submodule(str(node.target)), "code", str(node.target))
    return f"{node.target!r}{_sizes(node, trace)}"


def _sizes(node: fx.Node, trace: Trace) -> tuple[Any, ...]:
    return (trace.hinted_shape(node), trace.specs[node].dtype) if node in trace.specs else ()
