"""A rank's GPU memory, now and at its peak: what the allocator has given out, and what CUDA graphs reserve.

CUDA graphs (`stage/cuda_graphs.py`) are replayed in memory that was given out while they were captured. The allocator
counts it then, and as free afterwards, though nobody else can have it: it is counted here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet

import torch

_reserves: WeakSet[Reserve] = WeakSet()
_earlier = 0  # the peak before the last capture


class Reserve:
    """Bytes that only some CUDA graphs can use, as long as these live."""

    def __init__(self) -> None:
        self.bytes = 0
        _reserves.add(self)


@contextmanager
def reserving(reserve: Reserve, device: torch.device) -> Iterator[None]:
    """What the device takes meanwhile, and the allocator afterwards thinks is free, belongs to the reserve."""
    global _earlier
    _earlier = peak_on_device(device)
    before = _free(device)
    yield
    reserve.bytes += max(0, _free(device) - before)
    torch.cuda.reset_peak_memory_stats(device)


def held_on_device(device: torch.device | None = None) -> int:
    """What this process uses now."""
    return torch.cuda.memory_allocated(device) + _reserved()


def peak_on_device(device: torch.device) -> int:
    """The most that it has used."""
    return max(_earlier, torch.cuda.max_memory_allocated(device) + _reserved())


def forget_peak(device: torch.device) -> None:
    """Count from now on."""
    global _earlier
    _earlier = 0
    torch.cuda.reset_peak_memory_stats(device)


def _reserved() -> int:
    return sum(own.bytes for own in _reserves)


def _free(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
