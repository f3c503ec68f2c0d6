"""The choice of the channel between two ranks, from the location of each."""

from __future__ import annotations

import os
import socket
from typing import NamedTuple

import torch

from vpipe.errors import PeerError

SHARED_MEMORY, CUDA_IPC, NCCL, GLOO, STAGED = "shared_memory", "cuda_ipc", "nccl", "gloo", "staged"
WANTED = ("auto", GLOO, SHARED_MEMORY, CUDA_IPC, NCCL)
"""The channels that a user may choose. `gloo` between GPUs is `staged`: through pinned memory of the hosts."""
NEAR = (SHARED_MEMORY, CUDA_IPC)
"""The channels that need both ranks on one host."""


class RankLocation(NamedTuple):
    """The location of a rank, in terms that mean the same to every rank."""

    host: str  # its name, and more that tells hosts apart, after a slash
    gpu: str  # its identity, "" for a rank on the CPU
    number: int  # among the host's GPUs
    reaches: list[int]  # the host's GPUs whose memory it can read
    nccl: bool


def location_of(device: torch.device) -> RankLocation:
    if device.type != "cuda":
        return RankLocation(host_identity(), "", -1, [], False)
    others = range(torch.cuda.device_count())
    index = device.index
    reaches = [i for i in others if i == index or torch.cuda.can_device_access_peer(index, i)]
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    return RankLocation(host_identity(), gpu, index, reaches, torch.distributed.is_nccl_available())


def choose_kind(wanted: str, mine: RankLocation, theirs: RankLocation) -> str:
    """The same for both ends. NCCL refuses two ranks on one GPU, gloo carries no GPU tensors."""
    if bool(mine.gpu) != bool(theirs.gpu):
        raise PeerError("one rank computes on a GPU and another on the CPU: give all ranks GPUs, or none")
    together = mine.host == theirs.host
    if not mine.gpu:
        if wanted in (CUDA_IPC, NCCL):
            raise PeerError(
                f"channel {wanted} carries tensors of GPUs and the ranks are on the CPU: leave it out"
            )
        if wanted == SHARED_MEMORY and not together:
            raise PeerError("channel shared_memory needs all ranks on one host: use channel='auto' or 'gloo'")
        return SHARED_MEMORY if together and wanted != GLOO else GLOO
    readable = together and theirs.number in mine.reaches and mine.number in theirs.reaches
    apart = mine.gpu != theirs.gpu and mine.nccl and theirs.nccl
    if wanted == GLOO:
        return STAGED
    if wanted in (CUDA_IPC, SHARED_MEMORY):
        if not readable:
            raise PeerError(
                f"channel {wanted} needs GPUs of one host that read each other's memory: use 'auto'"
            )
        return CUDA_IPC
    if wanted == NCCL:
        # Ranks that share a GPU have nothing but CUDA IPC.
        return NCCL if apart else CUDA_IPC if readable else STAGED
    return CUDA_IPC if readable else NCCL if apart else STAGED


def host_identity() -> str:
    """Equal for ranks that can share memory: the same kernel and the same network namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        namespace = str(os.stat("/proc/self/ns/net").st_ino)
    except OSError:
        boot, namespace = "", ""
    return f"{socket.gethostname()}/{boot}/{namespace}"
