"""The memory that a rank uses, now and at its peak: of its GPU, or of its process where it has none.

CUDA graphs (`stage/cuda_graphs.py`) are replayed in memory that was allocated while they were captured. The allocator
counts it as free afterwards, though nothing else can use it: it is counted here.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet

import torch

from vpipe.system.host_memory import most_used_by_process, total_memory, used_by_process

_reserves: WeakSet[Reserve] = WeakSet()
_earlier = 0  # the peak before the last graph was captured


class Reserve:
    """Bytes that only some CUDA graphs can use, as long as these live."""

    def __init__(self) -> None:
        self.bytes = 0
        _reserves.add(self)


@contextmanager
def reserving(reserve: Reserve, device: torch.device) -> Iterator[None]:
    """Memory that is allocated inside, and counted as free by the allocator afterwards, belongs to the reserve."""
    global _earlier
    _earlier = peak_memory(device)
    before = _free(device)
    yield
    reserve.bytes += max(0, _free(device) - before)
    torch.cuda.reset_peak_memory_stats(device)


def used_memory(device: torch.device) -> int:
    """Bytes that this rank uses now: of its GPU, else of its process, libraries included."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) + _reserved()
    return used_by_process()


def available_memory(device: torch.device) -> int:
    """Bytes that this rank could still have: of its GPU, what its allocator keeps for graphs not among them."""
    if device.type != "cuda":
        return total_memory() - used_by_process()
    free, total = torch.cuda.mem_get_info(device)
    limit = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return min(free, limit - torch.cuda.memory_reserved(device)) + max(0, _free(device) - _reserved())


def peak_memory(device: torch.device) -> int:
    """The most bytes that this rank has used: of its GPU, else of its process."""
    if device.type == "cuda":
        return max(_earlier, torch.cuda.max_memory_allocated(device) + _reserved())
    return most_used_by_process()


def forget_peak(device: torch.device) -> None:
    """Count the peak from now on."""
    global _earlier
    _earlier = 0
    torch.cuda.reset_peak_memory_stats(device)


def release_memory(device: torch.device) -> None:
    """Give back what nothing refers to any more, also in cycles, and count the peak from now on."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        forget_peak(device)


def allocator_retries(device: torch.device) -> int:
    """Times that the GPU's allocator found no free block, waited for the GPU and released its cache."""
    if device.type == "cuda":
        return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))
    return 0


def _reserved() -> int:
    return sum(own.bytes for own in _reserves)


def _free(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
