"""The captured computation: one flat graph from batch, parameters and buffers to the loss."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import sympy
import torch
from torch import Tensor, fx, nn

Size: TypeAlias = "int | sympy.Expr"


class Kind(enum.Enum):
    """What a placeholder of the graph stands for."""

    FIELD = "field"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"


class Input(NamedTuple):
    kind: Kind
    name: str


class Spec(NamedTuple):
    """Type of a tensor whose sizes may depend on the batch."""

    shape: tuple[Size, ...]
    dtype: torch.dtype


@dataclass
class Trace:
    """A graph of aten operations (or of opaque modules) that ends in the loss.

    `symbols` says where a symbolic size is read from: a field of the batch and one of its dimensions;
    `hints` are the sizes that the example batch had. `boundaries`, where given, are the only nodes before which
    the graph may be cut.
    """

    graph: fx.Graph
    root: nn.Module
    inputs: dict[fx.Node, Input]
    constants: Mapping[str, Tensor]
    specs: dict[fx.Node, Spec]
    symbols: dict[sympy.Symbol, tuple[str, int]]
    hints: dict[sympy.Symbol, int]
    loss: fx.Node
    boundaries: frozenset[fx.Node] | None = None
    frozen: frozenset[str] = field(default_factory=frozenset)

    def nodes(self) -> Iterator[fx.Node]:
        """The operations in order, without placeholders and without the graph's output."""
        return (node for node in self.graph.nodes if node.op not in ("placeholder", "output"))

    def kind(self, node: fx.Node) -> Kind | None:
        entry = self.inputs.get(node)
        return entry.kind if entry else None

    def hinted_shape(self, node: fx.Node) -> tuple[int, ...]:
        """Shape for the example batch; sizes that depend on the data count as one."""
        return tuple(evaluate(size, self.hints, default=1) for size in self.specs[node].shape)

    def num_elements(self, node: fx.Node) -> int:
        elements = 1
        for size in self.hinted_shape(node):
            elements *= size
        return elements

    def num_bytes(self, node: fx.Node) -> int:
        return self.num_elements(node) * self.specs[node].dtype.itemsize

    def is_sized(self, node: fx.Node) -> bool:
        """Whether the node is one tensor whose shape follows from the batch's own sizes."""
        spec = self.specs.get(node)
        return spec is not None and all(free_symbols(size) <= self.symbols.keys() for size in spec.shape)


def free_symbols(size: Size) -> set[sympy.Symbol]:
    return set() if isinstance(size, int) else set(size.free_symbols)


def evaluate(size: Size, sizes: Mapping[sympy.Symbol, int], default: int | None = None) -> int:
    """Value of a symbolic size; `default` stands in for symbols that `sizes` does not bind."""
    if isinstance(size, int):
        return size
    bound = {symbol: sizes.get(symbol, default) for symbol in size.free_symbols}
    return int(size.subs(bound))


def as_size(size: Any) -> Size:
    """A plain int or sympy expression from what a fake tensor's shape holds."""
    if isinstance(size, torch.SymInt):
        expression = size.node.expr
        return int(expression) if expression.is_number else expression
    return int(size)


def submodules(node: fx.Node, root: nn.Module) -> list[fx.GraphModule]:
    """The graphs that a higher-order operation (no_grad, autocast) wraps."""
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return []
    bodies = [root.get_submodule(str(arg.target)) for arg in node.all_input_nodes if arg.op == "get_attr"]
    return [body for body in bodies if isinstance(body, fx.GraphModule)]


def module_path(node: fx.Node) -> tuple[str, ...]:
    """Names of the modules around a node, outermost first, without the capturing wrapper."""
    return node.meta.get("module_path", ())
