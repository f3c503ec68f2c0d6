"""The captured computation: one flat graph from batch, parameters and buffers to the loss."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import sympy
import torch
from torch import Tensor, fx, nn

if TYPE_CHECKING:
    from vpipe.graph.head import Head
    from vpipe.graph.outputs import ModelOutput

Size: TypeAlias = "int | sympy.Expr"


class Kind(enum.Enum):
    """The kinds of placeholders of the graph."""

    FIELD = "field"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"


class Input(NamedTuple):
    kind: Kind
    name: str


class Spec(NamedTuple):
    """Shape and dtype of a tensor; sizes may depend on the batch."""

    shape: tuple[Size, ...]
    dtype: torch.dtype


@dataclass
class Trace:
    """A graph of aten operations (or of opaque modules) that ends in the loss.

    `symbols` gives the field of the batch and the dimension from which a symbolic size is read, `hints` the sizes of
    the example batch, `bounds` the smallest and the largest size. `boundaries`, if given, are the only nodes before
    which the graph may be cut. The `meta` of a node has its `module_path`: the names of the modules around it,
    outermost first.
    """

    graph: fx.Graph
    root: nn.Module
    inputs: dict[fx.Node, Input]
    loss: fx.Node
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    specs: dict[fx.Node, Spec] = field(default_factory=dict)
    symbols: dict[sympy.Symbol, tuple[str, int]] = field(default_factory=dict)
    hints: dict[sympy.Symbol, int] = field(default_factory=dict)
    bounds: Mapping[sympy.Symbol, tuple[int, int | None]] = field(default_factory=dict)
    boundaries: frozenset[fx.Node] | None = None
    frozen: frozenset[str] = frozenset()
    unrolled: dict[tuple[str, int], int] = field(default_factory=dict)
    """Field and dimension of the sizes that only the exporter has fixed (`lengths.py`)."""
    output: ModelOutput | None = None
    """How the model's output is made (`outputs.py`); None where that is not known."""
    heads: tuple[Head, ...] = ()
    """What stages compute in pieces (`head.py`)."""

    def nodes(self) -> Iterator[fx.Node]:
        """The operations in order, without placeholders and without the graph's output."""
        return (node for node in self.graph.nodes if node.op not in ("placeholder", "output"))

    def kind(self, node: fx.Node) -> Kind | None:
        entry = self.inputs.get(node)
        return entry.kind if entry else None

    def hinted_shape(self, node: fx.Node) -> tuple[int, ...]:
        """Shape for the example batch, with 1 for sizes that depend on the data."""
        return tuple(evaluate(size, self.hints, default=1) for size in self.specs[node].shape)

    def num_elements(self, node: fx.Node) -> int:
        return math.prod(self.hinted_shape(node))

    def num_bytes(self, node: fx.Node) -> int:
        return self.num_elements(node) * self.specs[node].dtype.itemsize

    def is_sized(self, node: fx.Node) -> bool:
        """Whether the node is one tensor whose shape follows from the sizes of the batch."""
        spec = self.specs.get(node)
        return spec is not None and all(free_symbols(size) <= self.symbols.keys() for size in spec.shape)


def free_symbols(size: Size) -> set[sympy.Symbol]:
    return set() if isinstance(size, int) else set(size.free_symbols)


def evaluate(size: Size, sizes: Mapping[sympy.Symbol, int], default: int | None = None) -> int:
    """Value of a symbolic size; symbols that are not in `sizes` get the value `default`."""
    if isinstance(size, int):
        return size
    if isinstance(size, sympy.Symbol):
        return int(sizes.get(size, default))  # type: ignore[arg-type]
    return _substituted(size, tuple((symbol, sizes.get(symbol, default)) for symbol in size.free_symbols))


@lru_cache(maxsize=1 << 16)
def _substituted(size: Any, values: tuple[tuple[sympy.Symbol, int | None], ...]) -> int:
    """Layers have the same sizes again and again, and sympy is slow."""
    return int(size.subs(values))


def as_size(size: Any) -> Size:
    """An int or sympy expression from a size of a fake tensor."""
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
