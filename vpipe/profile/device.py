"""The device of a rank: its memory, and how fast saved tensors go to the host and back."""

from __future__ import annotations

from statistics import median
from time import perf_counter

import torch

from vpipe.communication import HOST
from vpipe.cost import DeviceCost
from vpipe.profile.overhead import measure_overhead
from vpipe.stage.host_store import make_store
from vpipe.system.host_memory import total_memory

COPIED, COUNT = 2 * 2**20, 16
"""Bytes of a tensor, such as a layer saves, and how many there are."""
REPEATS = 9
ADDED = 2**24
"""Elements of a gradient that stages share, such as an embedding's."""
SLACK = 10 * 2**20
"""Half of a piece in which torch's allocator takes memory from a GPU for tensors of 1 to 10 MB."""


def measure_device(device: torch.device = HOST) -> DeviceCost:
    to_host, from_host = _host_bandwidth(device)
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return DeviceCost(total, to_host, from_host, workspace=_workspace(device), swapped_in=3)
    return DeviceCost(total_memory(), to_host, from_host, measure_overhead())


def measure_adding(device: torch.device, dtype: torch.dtype | None, copied: bool) -> float:
    """Seconds a byte to add up two parts of a gradient, as `runtime/gradients.py` does; `copied`: one of them first."""
    if device.type != "cuda":
        return 0.0  # copying the messages takes longer
    part, taken = torch.ones(ADDED, dtype=dtype, device=device), []
    for _ in range(REPEATS):
        start = _now(device)
        own = part.clone() if copied else part
        own.to(torch.float32, copy=True).add_(part)
        taken.append(_now(device) - start)
    return median(taken[1:]) / part.nbytes


def _host_bandwidth(device: torch.device) -> tuple[float, float]:
    """Bytes a second out and back, through the store that swapping uses."""
    store = make_store(device)
    tensors = [torch.ones(COPIED, dtype=torch.uint8, device=device) for _ in range(COUNT)]
    out, back = [], []
    for _ in range(REPEATS):
        start = _now(device)
        tickets = store.put(tensors)
        tensors.clear()  # as a forward's end drops them
        store.settle()
        there = _now(device)
        store.fetch(tickets)
        tensors = [store.take(ticket) for ticket in tickets]
        out.append(there - start)
        back.append(_now(device) - there)
    return COUNT * COPIED / median(out[1:]), COUNT * COPIED / median(back[1:])


def _workspace(device: torch.device) -> int:
    """What cuBLAS holds for the two threads of a rank that multiply: its own, and autograd's."""
    torch._C._cuda_clearCublasWorkspaces()  # else those of earlier products are there already
    before = torch.cuda.memory_allocated(device)
    _multiply(device)
    return torch.cuda.memory_allocated(device) - before


def _multiply(device: torch.device) -> None:
    """Forward and backward; nothing of it is left but what the library keeps."""
    one = torch.ones(256, 256, device=device, requires_grad=True)
    (one @ one).sum().backward()


def _now(device: torch.device) -> float:
    """The time when the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()
