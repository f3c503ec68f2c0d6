"""Models of the zoo in a given precision, one object for all tests, and data for them."""

import threading
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tests import models

_BUILDING = threading.Lock()


def converted(batch: Any, dtype: torch.dtype) -> Any:
    def convert(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    if isinstance(batch, dict):
        return {name: convert(tensor) for name, tensor in batch.items()}
    return type(batch)(convert(tensor) for tensor in batch)


def varied(batch: Any, count: int) -> list[Any]:
    """Minibatches that differ: the samples rolled, the tokens changed where there are tokens."""
    return [
        {n: t.roll(i, 0) for n, t in batch.items()}
        if isinstance(batch, dict)
        else type(batch)(t.roll(i, 0) for t in batch)
        for i in range(count)
    ]


def example(name: str, dtype: torch.dtype = torch.float64, **options: Any) -> models.Example:
    """One model object for all tests that want the same one, also for ranks that are threads; it is never changed."""
    with _BUILDING:
        return _built(name, dtype, **options)


@cache
def _built(name: str, dtype: torch.dtype, **options: Any) -> models.Example:
    model, batch, loss_fn = getattr(models, name)(**options)
    return model.to(dtype), converted(batch, dtype), loss_fn
