"""Out of memory, as an error that says who needed it, for what, and how much was there."""

import re

import torch

from vpipe.errors import OutOfMemoryError
from vpipe.schedule import Action

MEMORY_ERRORS = (MemoryError, RuntimeError)
"""What allocators raise; torch's are RuntimeErrors, of which most are something else."""
_SAID = re.compile(r"can't allocate memory|not enough memory|Cannot allocate memory", re.IGNORECASE)
_WANTED = re.compile(r"[Tt]ried to allocate ([\d.]+ ?[KMGT]?i?B|\d+ bytes)")


def explain(error: BaseException, rank: int, action: Action | None) -> OutOfMemoryError | None:
    """The error to raise instead; None if it is not about memory."""
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    if not known and not _SAID.search(str(error)):
        return None
    wanted = _WANTED.search(str(error))
    place = f"rank {rank}" if action is None else f"rank {rank}, stage {action.stage}, action {action}"
    need = "" if wanted is None else f": it tried to allocate {wanted[1]}"
    return OutOfMemoryError(f"{place}: out of memory{need}; {_held()}")


def _held() -> str:
    """What this process holds, and what the machine or the device has left."""
    if torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        return f"it holds {torch.cuda.memory_allocated():,} bytes of the GPU, of which {free:,} of {total:,} are free"
    resident = _kibibytes("/proc/self/status", "VmRSS")
    left = _kibibytes("/proc/meminfo", "MemAvailable")
    if resident is None or left is None:
        return "what it holds is not known"
    return f"it holds {resident * 1024:,} bytes, and the machine has {left * 1024:,} left"


def _kibibytes(path: str, key: str) -> int | None:
    try:
        with open(path) as file:
            lines = dict(line.split(":", 1) for line in file if ":" in line)
        return int(lines[key].split()[0])
    except (OSError, KeyError, ValueError):
        return None
