"""The device of a rank: the GPU that it was given, or the CPU."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import Tensor

from vpipe.errors import VPipeError
from vpipe.system.environment import DEVICE, GPU_SHARE

LOCAL_RANK = (
    "LOCAL_RANK",  # torchrun
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_LOCAL_RANK",  # Open MPI
    "MPI_LOCALRANKID",  # Intel MPI, MPICH
    "MV2_COMM_WORLD_LOCAL_RANK",  # MVAPICH
    "PMI_LOCAL_RANK",
    "PALS_LOCAL_RANKID",  # Cray
    "FLUX_TASK_LOCAL_ID",
    "JSM_NAMESPACE_LOCAL_RANK",  # LSF
)
"""Variables in which launchers give a process its number among those of its host."""
AUTO_GRAPHS = "auto"
"""CUDA graphs where they gain and fit; none on a CPU."""


def local_rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """This process's number among those of its host, if its launcher has given it one."""
    given = (environment.get(name, "") for name in LOCAL_RANK)
    return next((int(number) for number in given if number.isdecimal()), None)


def choose_device(wanted: str | torch.device | None, local_rank: int) -> torch.device:
    """The requested device, or the launcher's choice, or a GPU for each rank of the host, or the CPU."""
    name = str(wanted or os.environ.get(DEVICE) or _default(local_rank))
    try:
        device = torch.device(name)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise VPipeError(f"device is {name!r}: write cpu, cuda or cuda:<number> ({reason})") from None
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise VPipeError(f"device is {name!r}: vpipe computes on cpu and cuda")
    count = torch.cuda.device_count()
    index = device.index if device.index is not None else local_rank % max(count, 1)
    if index >= count:
        raise VPipeError(f"device is {name!r} and this host has {count} GPUs: give one below, or cpu")
    return torch.device("cuda", index)


def is_named(wanted: str | torch.device | None) -> bool:
    """Whether `choose_device` takes a GPU by its number, which somebody has written down, and not by the rank's."""
    return ":" in str(wanted or os.environ.get(DEVICE, ""))


def card_identity(device: torch.device) -> str:
    """The GPU's UUID, "" for the CPU: the same for every process, however it numbers its GPUs."""
    if device.type != "cuda":
        return ""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if device.index < len(visible) and visible[device.index].strip().startswith("MIG-"):
        return visible[device.index].strip()  # instances of one card may have its UUID
    return str(torch.cuda.get_device_properties(device).uuid)


def _default(local_rank: int) -> str:
    count = torch.cuda.device_count()
    return f"cuda:{local_rank % count}" if count else "cpu"


def check_cuda_graphs(wanted: bool | str, device: torch.device) -> None:
    if wanted not in (False, True, AUTO_GRAPHS):
        raise VPipeError(f"cuda_graphs is {wanted!r}: give True, False or {AUTO_GRAPHS!r}")
    if wanted is True and device.type != "cuda":
        raise VPipeError(
            f"cuda_graphs are requested on the device {device}: leave them out, or train on a GPU"
        )


def limit_memory(device: torch.device, bytes_: int | None) -> None:
    """Let this process have so much of its GPU's memory, or its equal share."""
    share = int(os.environ.get(GPU_SHARE, "1"))
    if device.type != "cuda" or (bytes_ is None and share == 1):
        return
    total = torch.cuda.get_device_properties(device).total_memory
    limit = bytes_ if bytes_ is not None else total // share
    if limit * share > total:
        raise VPipeError(
            f"gpu_memory is {limit} bytes for each of {share} ranks on one GPU, which has {total}: "
            "give less, or more GPUs"
        )
    torch.cuda.set_per_process_memory_fraction(limit / total, device)


def make_deterministic() -> None:
    """For this process, from now on; before anything is computed on a GPU."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def copied_to_host(number: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """The number in host memory, once the event has passed; None: it is there."""
    if not number.is_cuda:
        return number, None
    here = torch.empty_like(number, device="cpu", pin_memory=True).copy_(number, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return here, copied
