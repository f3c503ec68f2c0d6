"""Constants that a model on `meta` writes out in its code, as operations that make them.

    x[..., [-2], :]                          an index
    torch.tensor([1.0, 2.0], device=x.device)

The exporter keeps such values as a tensor on the model's own device, and on `meta` a tensor has no values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_META = torch.device("meta")


def call_with_constants(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The function's result, where the constants that it is given or makes on `meta` are made by operations."""
    name = getattr(func, "__name__", "")
    if name in ("__getitem__", "__setitem__") and args[0].is_meta:
        return func(args[0], _made_index(args[1]), *args[2:])
    if name in ("tensor", "as_tensor", "new_tensor"):
        before = args[0] if name == "new_tensor" else None
        data = kwargs["data"] if "data" in kwargs else args[0 if before is None else 1]
        device = kwargs.get("device") or (before is not None and before.device)
        if device and torch.device(device) == _META and _is_written(data, (bool, int, float)):
            return _made(data, kwargs.get("dtype") or (None if before is None else before.dtype))
    return func(*args, **kwargs)


def _made_index(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(map(_made_index, index))
    return _made(index, torch.int64) if isinstance(index, list) and _is_written(index, (int,)) else index


def _is_written(data: Any, kinds: tuple[type, ...]) -> bool:
    """Whether these are plain numbers, in lists that are not empty."""
    if isinstance(data, list | tuple):
        return bool(data) and all(_is_written(entry, kinds) for entry in data)
    return type(data) in kinds


def _made(data: Any, dtype: torch.dtype | None) -> Tensor:
    if isinstance(data, list | tuple):
        return torch.stack([_made(entry, dtype) for entry in data])
    return torch.full((), data, dtype=dtype, device=_META)
