"""Answers and replacements while a model is exported, for code that the exporter cannot follow.

A graph has no branches that depend on data. Two kinds of them are common, and neither needs one:

    if torch.rand([]) < self.layerdrop:     LayerDrop: with a probability of 0 no layer is ever skipped
    if labels.max() >= vocab_size: raise    a check: it is left out of the graph, as `assert` is

The CTC loss is replaced by an operator that can be exported (`ctc_loss.py`), and a histogram of whole numbers by one
that runs on every device (`histogram.py`). Constants of a model on `meta` keep their values (`written_constants.py`).
"""

from __future__ import annotations

import ast
import linecache
import operator
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from vpipe.errors import CaptureError
from vpipe.graph.ctc_loss import ctc_loss
from vpipe.graph.histogram import histc
from vpipe.graph.written_constants import call_with_constants

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    name: getattr(operator, name.strip("_"))
    for plain in ("lt", "le", "gt", "ge")
    for name in (plain, f"__{plain}__")
}


class CaptureMode(TorchFunctionMode):
    """Active while a model is exported."""

    def __init__(self) -> None:
        super().__init__()
        self._drawn: list[Tensor] = []
        """Single numbers of torch.rand."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _COMPARISONS and self._was_drawn(args[0]) and isinstance(args[1], int | float):
            return _compare_drawn(_COMPARISONS[name], float(args[1]))
        if name == "__bool__" and (passing := _passes_check(sys._getframe(1))) is not None:
            return passing
        if func is functional.ctc_loss:
            return ctc_loss(*args, **kwargs)
        if func is torch.histc:
            return histc(*args, **kwargs)
        result = call_with_constants(func, args, kwargs)
        if func is torch.rand and isinstance(result, Tensor) and result.ndim == 0:
            self._drawn.append(result)
        return result

    def _was_drawn(self, value: Any) -> bool:
        return any(value is drawn for drawn in self._drawn)


def _compare_drawn(compare: Callable[[float, float], bool], bound: float) -> bool:
    """The comparison of any number from 0 up to 1 with this one."""
    lowest, highest = compare(0.0, bound), compare(1.0 - 2**-24, bound)
    if lowest != highest:
        raise CaptureError(
            f"the model draws a number and compares it with {bound:g} to decide what it runs (LayerDrop): a captured "
            "graph always runs the same; set that probability (layerdrop, encoder_layerdrop, decoder_layerdrop) to 0"
        )
    return lowest


def _passes_check(frame: FrameType | None) -> bool | None:
    """The answer with which the statement at this frame raises nothing; None if it is no check."""
    while frame is not None and frame.f_globals.get("__name__", "").startswith("torch."):
        frame = frame.f_back
    if frame is None:
        return None
    statement = _statement(frame)
    if isinstance(statement, ast.Assert):
        return True
    if isinstance(statement, ast.If) and all(isinstance(inner, ast.Raise) for inner in statement.body):
        parts = statement.test.values if isinstance(statement.test, ast.BoolOp) else [statement.test]
        negated = {isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.Not) for part in parts}
        return negated.pop() if len(negated) == 1 else None
    return None


def _statement(frame: FrameType) -> ast.stmt | None:
    """The innermost statement of the source at the frame's line."""
    try:
        tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals)))
    except (SyntaxError, ValueError):
        return None
    found: ast.stmt | None = None
    for node in _statements_around(tree, frame.f_lineno):
        found = node
    return found


def _statements_around(tree: ast.AST, line: int) -> Iterator[ast.stmt]:
    """From the outermost to the innermost."""
    for child in ast.iter_child_nodes(tree):
        first, last = getattr(child, "lineno", line), getattr(child, "end_lineno", line) or line
        if first <= line <= last:
            if isinstance(child, ast.stmt):
                yield child
            yield from _statements_around(child, line)
