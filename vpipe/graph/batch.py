"""Batches: their fields by name, and the check that a batch fits the captured model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import sympy
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from vpipe.errors import BatchError, CaptureError
from vpipe.graph.trace import Kind, Size, Trace, evaluate, free_symbols

Batch: TypeAlias = "Mapping[str, Any] | Sequence[Any] | Tensor"


class BatchLayout:
    """The layout of a batch: its kind, its fields in order, and those that the model takes.

    A field may hold dicts, lists and tuples: `forms` has their structure, and what is in them has names such as
    `inputs.pixels.0`. `tensors` are the names of all tensors, `constants` the other values in the example.
    """

    def __init__(self, model: nn.Module, batch: Batch, loss_fn: Callable[..., Tensor] | None) -> None:
        self.kind: type
        if isinstance(batch, Tensor):
            self.kind, values = Tensor, [batch]
        elif isinstance(batch, Mapping):
            self.kind, values = Mapping, list(batch.values())
        elif isinstance(batch, Sequence) and not isinstance(batch, str):
            self.kind, values = Sequence, list(batch)
        else:
            raise BatchError(
                f"example batch is a {type(batch).__name__}; give a dict of tensors, a sequence of tensors"
                " or one tensor"
            )
        if isinstance(batch, Mapping):
            self.names = tuple(batch)
            self.model_names = _taken_by_name(model, self.names, loss_fn)
        else:
            self.names, self.model_names = _taken_by_position(model, len(values), loss_fn)
        top = dict(zip(self.names, values, strict=True))
        self.forms = {
            name: pytree.tree_structure(value)
            for name, value in top.items()
            if isinstance(value, dict | list | tuple)
        }
        entries = self._flat(top)
        self._order = list(entries)
        for name, value in entries.items():
            if not isinstance(value, Tensor | bool | int | float | str | None):
                raise BatchError(
                    f"batch field {name!r} is a {type(value).__name__}; a field is a tensor, a number, a string or "
                    "None, or a dict, list or tuple of these"
                )
        self.tensors = [name for name, value in entries.items() if isinstance(value, Tensor)]
        if not self.tensors:
            raise BatchError(f"example batch has no tensor among its fields {list(self.names)}")
        self.constants = {name: value for name, value in entries.items() if name not in self.tensors}

    def entries(self, batch: Batch) -> dict[str, Any]:
        """The values of the batch by name, or an error that names missing and unknown fields."""
        return self._flat(self._top(batch))

    def nested(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """The fields as the model takes them, from the values by name."""
        fields = dict(entries)
        for name, form in self.forms.items():
            inside = [key for key in self._order if key.startswith(f"{name}.")]
            fields[name] = pytree.tree_unflatten([entries[key] for key in inside], form)
        return {name: fields[name] for name in self.names}

    def _flat(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Fields that hold dicts, lists and tuples are replaced by what is in them."""
        flat: dict[str, Any] = {}
        for name, value in fields.items():
            if name not in self.forms:
                flat[name] = value
                continue
            if pytree.tree_structure(value) != self.forms[name]:
                raise BatchError(
                    f"batch field {name!r} is {_outline(value)}, but the model was captured with another structure; "
                    "give every batch the structure of the example"
                )
            for path, leaf in pytree.tree_flatten_with_path(value)[0]:
                flat[
                    ".".join([name, *(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)])
                ] = leaf
        return flat

    def _top(self, batch: Batch) -> dict[str, Any]:
        if self.kind is Tensor:
            if not isinstance(batch, Tensor):
                raise BatchError(f"batch is a {type(batch).__name__}; the model was captured with one tensor")
            return {self.names[0]: batch}
        if self.kind is Mapping:
            if not isinstance(batch, Mapping):
                raise BatchError(
                    f"batch is a {type(batch).__name__}; the model was captured with the fields {list(self.names)}"
                )
            missing = [name for name in self.names if name not in batch]
            extra = [name for name in batch if name not in self.names]
            if missing or extra:
                raise BatchError(
                    f"batch has the fields {list(batch)}, expected {list(self.names)}"
                    f" (missing: {missing}, unknown: {extra})"
                )
            return {name: batch[name] for name in self.names}
        if isinstance(batch, Tensor | Mapping | str) or not isinstance(batch, Sequence):
            raise BatchError(
                f"batch is a {type(batch).__name__}; the model was captured with a sequence of {len(self.names)}"
            )
        if len(batch) != len(self.names):
            raise BatchError(f"batch has {len(batch)} fields, expected {len(self.names)}: {list(self.names)}")
        return dict(zip(self.names, batch, strict=True))


def _outline(value: Any) -> str:
    """The structure of a field in words."""
    if isinstance(value, dict):
        return f"a dict of {list(value)}"
    return (
        f"a {type(value).__name__} of {len(value)}"
        if isinstance(value, list | tuple)
        else type(value).__name__
    )


def _taken_by_name(
    model: nn.Module, names: tuple[str, ...], loss_fn: Callable[..., Tensor] | None
) -> tuple[str, ...]:
    parameters = inspect.signature(model.forward).parameters
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    taken = tuple(name for name in names if name in parameters)
    rest = [name for name in names if name not in parameters]
    if loss_fn is not None or not rest:
        return taken
    if open_ended:
        return names
    raise BatchError(
        f"batch fields {rest} are not parameters of {type(model).__name__}.forward, which takes"
        f" {list(parameters)}; rename them, leave them out, or give a loss_fn that takes them"
    )


def _taken_by_position(
    model: nn.Module, count: int, loss_fn: Callable[..., Tensor] | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names for the fields of a sequence, and those that the model takes: parameters of forward, then of loss_fn."""
    accepted = _positional(model.forward)
    taken = count if accepted is None else min(count, len(accepted))
    if loss_fn is None and taken < count:
        raise BatchError(
            f"batch has {count} fields but {type(model).__name__}.forward takes {taken}: {accepted};"
            " leave the others out or give a loss_fn that takes them"
        )
    names = list(accepted[:taken]) if accepted is not None else [f"field{i}" for i in range(count)]
    rest = (_positional(loss_fn) or [])[1:] if loss_fn is not None else []
    names += rest[: count - len(names)]
    if len(set(names)) < count:
        names = [f"field{i}" for i in range(count)]
    return tuple(names), tuple(names[:taken])


def _positional(function: Callable[..., Any]) -> list[str] | None:
    """Names of the positional parameters; None with `*args`."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in kinds]


class FieldCheck:
    """The expected shapes and dtypes of a batch's tensors, with symbols for the sizes that may vary.

    `dtypes` are those of the example batch, `specs` those in which the model was traced.
    """

    def __init__(self, layout: BatchLayout, example: Mapping[str, Tensor], trace: Trace) -> None:
        self.layout = layout
        fields = ((n, entry.name) for n, entry in trace.inputs.items() if entry.kind is Kind.FIELD)
        self.specs = {name: trace.specs[node] for node, name in fields}
        self.dtypes = {name: value.dtype for name, value in example.items()}
        self.symbols, self.bounds, self.unrolled = trace.symbols, trace.bounds, trace.unrolled
        self.one_batch_size = len(set(_sample_counts(example).values())) == 1
        self._passed: set[tuple[Any, ...]] = set()

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        """The batch's tensors by name; raises BatchError where they differ from the captured model's."""
        entries = self.layout.entries(batch)
        for name, expected in self.layout.constants.items():
            if entries[name] is not expected and entries[name] != expected:
                raise BatchError(
                    f"batch field {name!r} is {entries[name]!r}, but the model was captured with {expected!r};"
                    " fields that are no tensors must not change (capture again for another value)"
                )
        fields = {name: entries[name] for name in self.layout.tensors}
        kinds = tuple(
            (getattr(value, "shape", None), getattr(value, "dtype", None)) for value in fields.values()
        )
        if kinds not in self._passed:  # symbolic arithmetic is slow, and most batches have the same shapes
            for name, value in fields.items():
                self._check_type(name, value)
            self._check_shapes(fields)
            self._passed.add(kinds)
        traced = {name: self.specs[name].dtype for name in fields}
        return {n: t if t.dtype is traced[n] else t.to(traced[n]) for n, t in fields.items()}

    def _check_shapes(self, fields: Mapping[str, Tensor]) -> None:
        sizes = self.sizes({name: value.shape for name, value in fields.items()})
        for name, value in fields.items():
            for dimension, size in enumerate(self.specs[name].shape):
                self._check_size(name, value, dimension, size, sizes)
        counts = _sample_counts(fields)
        if self.one_batch_size and len(set(counts.values())) > 1:
            raise BatchError(f"batch fields disagree about the number of samples (dimension 0): {counts}")

    def sizes(self, fields: Mapping[str, torch.Size]) -> dict[sympy.Symbol, int]:
        """The sizes of a batch with fields of these shapes, by symbol."""
        return {symbol: fields[name][dim] for symbol, (name, dim) in self.symbols.items()}

    def _check_type(self, name: str, value: Any) -> None:
        spec = self.specs[name]
        if not isinstance(value, Tensor):
            raise BatchError(f"batch field {name!r} is a {type(value).__name__}, expected a tensor")
        if value.dtype not in (self.dtypes[name], spec.dtype):
            raise BatchError(
                f"batch field {name!r} has dtype {_short(value.dtype)}, expected {_short(self.dtypes[name])};"
                f" convert it with .to({self.dtypes[name]})"
            )
        if value.ndim != len(spec.shape):
            raise BatchError(
                f"batch field {name!r} has shape {list(value.shape)}, expected {len(spec.shape)} dimensions"
            )

    def _check_size(
        self, name: str, value: Tensor, dimension: int, size: Size, sizes: Mapping[sympy.Symbol, int]
    ) -> None:
        got = value.shape[dimension]
        place = f"batch field {name!r} has size {got} in dimension {dimension}"
        if isinstance(size, int):
            if got != size:
                raise BatchError(f"{place}, expected {size} ({self._why_fixed(name, dimension, size)})")
            return
        if free_symbols(size) <= sizes.keys() and got != evaluate(size, sizes):
            other, other_dimension = self.symbols[min(free_symbols(size), key=str)]
            raise BatchError(
                f"{place}, expected {evaluate(size, sizes)}"
                f" (it follows dimension {other_dimension} of field {other!r})"
            )
        low, high = self.bounds.get(size, (0, None))
        if got < low or (high is not None and got > high):
            raise BatchError(f"{place}, expected {low} to {'any' if high is None else high}")

    def _why_fixed(self, name: str, dimension: int, size: int) -> str:
        if (name, dimension) in self.unrolled:
            return "torch.export has fixed it, not the model; pad or cut every batch to it"
        if size == 1:
            return "capture with a larger example for another"
        return "the captured graph needs it; pad or cut every batch to it"


def _sample_counts(fields: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: value.shape[0] for name, value in fields.items() if value.ndim}


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def for_tracing(fields: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The fields on the model's own device (`meta` included), float32 ones in a half-precision model's dtype."""
    tensors = [*model.parameters(), *model.buffers()]
    if not tensors:
        raise CaptureError(f"{type(model).__name__} has no parameters: there is nothing to train")
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    half = dtypes.pop() if len(dtypes) == 1 and dtypes <= {torch.float16, torch.bfloat16} else None
    return {
        name: value.to(tensors[0].device, half if value.dtype is torch.float32 else None)
        for name, value in fields.items()
    }
