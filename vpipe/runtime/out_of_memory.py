"""The error for a rank that is out of memory: rank, stage, action, bytes requested, held and free."""

import re
from contextlib import suppress
from typing import NamedTuple

import torch

from vpipe.errors import OutOfMemoryError, VPipeError
from vpipe.schedule import Action
from vpipe.system.device_memory import used_memory
from vpipe.system.host_memory import free_memory
from vpipe.system.units import read_bytes

MEMORY_ERRORS = (MemoryError, RuntimeError)
"""The types that allocators raise; most RuntimeErrors are something else."""
_OUT_OF_MEMORY = re.compile(r"can't allocate memory|not enough memory|Cannot allocate memory", re.IGNORECASE)
_REQUESTED = re.compile(r"[Tt]ried to allocate ([\d.]+ ?[KMGT]?i?B|\d+ bytes)")


class DeviceMemory(NamedTuple):
    """Bytes of the device that this rank computes on; None where they are not known."""

    held: int | None
    free: int | None
    """Still available to this process."""
    words: str


def explain(error: BaseException, rank: int, action: Action | None) -> OutOfMemoryError | None:
    """The error to raise instead; None if it is not about memory."""
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    if not known and not _OUT_OF_MEMORY.search(str(error)):
        return None
    found = _REQUESTED.search(str(error))
    place = f"rank {rank}" if action is None else f"rank {rank}, stage {action.stage}, action {action}"
    need = "" if found is None else f": it tried to allocate {found[1]}"
    held, free, words = memory_now()
    return OutOfMemoryError(
        f"{place}: out of memory{need}; {words}", wanted=_bytes(found), held=held, free=free
    )


def memory_now() -> DeviceMemory:
    """What this process holds, and what the machine or the device has left."""
    if torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        held, kept = used_memory(torch.device("cuda")), torch.cuda.memory_reserved()
        limit = int(total * torch.cuda.get_per_process_memory_fraction())
        words = f"it holds {held:,} bytes of the GPU, of which {free:,} of {total:,} are free"
        return DeviceMemory(held, max(0, min(free + kept, limit) - held), words)
    resident, left = _resident(), free_memory()
    if resident is None or left is None:
        return DeviceMemory(resident, left, "what it holds is not known")
    return DeviceMemory(resident, left, f"it holds {resident:,} bytes, and the machine has {left:,} left")


def _bytes(found: re.Match[str] | None) -> int | None:
    with suppress(VPipeError):
        return None if found is None else read_bytes(found[1].removesuffix(" bytes"))
    return None


def _resident() -> int | None:
    try:
        with open("/proc/self/status") as file:
            lines = dict(line.split(":", 1) for line in file if ":" in line)
        return int(lines["VmRSS"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
