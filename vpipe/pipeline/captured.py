"""The captured model of a pipeline; one that was captured before the ranks were forked is not captured again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakSet

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from vpipe.communication import World
from vpipe.graph import ModelGraph, capture
from vpipe.stage.precision import compute_dtype, skeleton


class _Ahead(NamedTuple):
    model: nn.Module
    of: tuple[Any, ...]
    graph: ModelGraph


_ahead: _Ahead | None = None
_unchanged: WeakSet[nn.Module] = WeakSet()


def captured(
    model: nn.Module,
    example_batch: Any,
    loss_fn: Callable[..., Tensor] | None,
    precision: str,
    chunked_loss: bool,
    world: World | None = None,
) -> ModelGraph:
    """The model in this precision as a graph. A graph is never changed and holds no weights."""
    facts = _facts(example_batch, loss_fn, precision, chunked_loss)
    if _ahead is not None and _ahead.model is model and _ahead.of == facts:
        return _ahead.graph

    def make() -> ModelGraph:
        dtype = compute_dtype(precision)
        own = model if dtype is None else skeleton(model, dtype)
        return capture(own, example_batch, loss_fn, chunked_loss=chunked_loss, keep=model in _unchanged)

    return make() if world is None else world.once("graph", (model, facts), make)


def keep_graph_of(model: nn.Module) -> None:
    """What is exported of this model may be kept for other processes: its code is that of its library."""
    _unchanged.add(model)


def capture_ahead(
    model: nn.Module,
    example_batch: Any,
    loss_fn: Callable[..., Tensor] | None,
    precision: str,
    chunked_loss: bool,
) -> None:
    """Capture this model, which nobody changes from now on, for this process and its forks."""
    global _ahead
    graph = captured(model, example_batch, loss_fn, precision, chunked_loss)
    _ahead = _Ahead(model, _facts(example_batch, loss_fn, precision, chunked_loss), graph)


def _facts(batch: Any, *others: Any) -> tuple[Any, ...]:
    """What a graph depends on besides the model. Sizes count: the work of blocks is that of the example."""
    leaves, tree = pytree.tree_flatten(batch)
    sizes = [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return str(tree), sizes, *others
