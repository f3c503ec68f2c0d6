"""The memory of a GPU that a rank takes beside its allocator: its CUDA context, and the communicators of NCCL.

It shows only as a difference in the device's free memory, so another process makes them, step by step.
"""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

COMMUNICATORS = 4
"""Of a rank inside a pipeline: one for each direction to the rank before it and to the rank behind it."""
LIMIT = 120.0
"""Seconds after which the other process is given up."""
_PROGRAM = "import runpy, sys; runpy.run_path(sys.argv[1])['show'](*map(int, sys.argv[2:]))"
"""It imports this file alone, and with it nothing but torch."""


class OutsideMemory(NamedTuple):
    """Bytes of a rank."""

    context: int = 0
    communicators: int = 0


def measure_outside(device: torch.device, *, nccl: bool = True) -> OutsideMemory:
    """Nothing where it cannot be measured. While it is measured nobody else may allocate on the device.

    Without `nccl` communicators count nothing: ranks that share a card have none.
    """
    before = torch.cuda.mem_get_info(device)[0]
    communicators = 2 if nccl and dist.is_nccl_available() else 0
    command = [sys.executable, "-c", _PROGRAM, __file__, str(device.index), str(communicators)]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=True).stdout
        return _differences([before, *json.loads(shown.splitlines()[-1])])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return OutsideMemory()


def _differences(free: list[int]) -> OutsideMemory:
    """Of the free memory before, with a context, with one communicator and with two.

    The first communicator also loads NCCL's kernels, every further one only takes its own memory.
    """
    used = [max(0, before - after) for before, after in pairwise(free)]
    first, further = (*used[1:], 0, 0)[:2]
    return OutsideMemory(used[0] if used else 0, first + (COMMUNICATORS - 1) * further)


def show(index: int, communicators: int) -> None:
    """What the other process does: it prints the free memory after each step."""
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    number = torch.ones(1, device=device)
    free = [torch.cuda.mem_get_info(device)[0]]
    groups = []
    for _ in range(communicators):
        options = dist.ProcessGroupNCCL.Options()
        group: Any = dist.ProcessGroupNCCL(dist.HashStore(), 0, 1, options)
        group.allreduce([number]).wait()
        torch.cuda.synchronize(device)
        groups.append(group)
        free.append(torch.cuda.mem_get_info(device)[0])
    print(json.dumps(free), flush=True)
    for group in groups:
        group.shutdown()
