"""Errors of an action that vpipe explains: out of memory, and what torch.compile could not compile."""

import re
from contextlib import suppress

import torch

from vpipe.communication import HOST
from vpipe.errors import CompileError, OutOfMemoryError, VPipeError
from vpipe.schedule import Action
from vpipe.system.device_memory import held_on_device, used_memory
from vpipe.system.host_memory import free_memory
from vpipe.system.units import read_bytes

EXPLAINED = (MemoryError, RuntimeError)
"""The types that allocators and compilers raise; most RuntimeErrors are something else."""
_OUT_OF_MEMORY = re.compile(r"can't allocate memory|not enough memory|Cannot allocate memory", re.IGNORECASE)
_REQUESTED = re.compile(r"[Tt]ried to allocate ([\d.]+ ?[KMGT]?i?B|\d+ bytes)")


def explain(error: BaseException, rank: int, action: Action | None) -> VPipeError | None:
    """The error to raise instead; None if this one is about something else."""
    place = f"rank {rank}" if action is None else f"rank {rank}, stage {action.stage}, action {action}"
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    if known or _OUT_OF_MEMORY.search(str(error)):
        return _out_of_memory(str(error), place)
    # By name: to import the compiler's own class takes seconds, for nothing if nobody compiles.
    if any(kind.__name__ == "TorchDynamoException" for kind in type(error).__mro__):
        return _not_compiled(error, place)
    return None


def _out_of_memory(message: str, place: str) -> OutOfMemoryError:
    """With the bytes that were requested, held and free."""
    requested = _REQUESTED.search(message)
    need = "" if requested is None else f": it tried to allocate {requested[1]}"
    wanted = None
    if requested is not None:
        with suppress(VPipeError):
            wanted = read_bytes(requested[1].removesuffix(" bytes"))
    available: int | None
    if torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        held, kept = held_on_device(), torch.cuda.memory_reserved()
        limit = int(total * torch.cuda.get_per_process_memory_fraction())
        available = max(0, min(free + kept, limit) - held)
        words = f"it holds {held:,} bytes of the GPU, of which {free:,} of {total:,} are free"
    else:
        held, available = used_memory(HOST), free_memory()
        words = f"it holds {held:,} bytes"
        if available is not None:
            words += f", and the machine has {available:,} left"
    return OutOfMemoryError(
        f"{place}: out of memory{need}; {words}", wanted=wanted, held=held, free=available
    )


def _not_compiled(error: BaseException, place: str) -> CompileError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " ".join(lines[:2]) or "it does not say why"
    return CompileError(
        f"{place}: torch.compile failed with {type(error).__name__}: {said}; leave compile out, or see its whole "
        "message with TORCHDYNAMO_VERBOSE=1"
    )
