"""The choice of the channel between two ranks, from the location of each."""

from __future__ import annotations

from typing import NamedTuple

import torch

from vpipe.errors import PeerError
from vpipe.system.device import card_identity
from vpipe.system.host_identity import host_identity, namespace_of

SHARED_MEMORY, CUDA_IPC, NCCL, GLOO, STAGED = "shared_memory", "cuda_ipc", "nccl", "gloo", "staged"
WANTED = ("auto", GLOO, SHARED_MEMORY, CUDA_IPC, NCCL)
"""The channels that a user may choose. `gloo` between GPUs is `staged`: through pinned memory of the hosts."""
NEAR = (SHARED_MEMORY, CUDA_IPC)
"""The channels that need both ranks on one host."""


class RankLocation(NamedTuple):
    """The location of a rank, in terms that mean the same to every rank."""

    host: str  # `host_identity`
    ipc: str  # its IPC namespace
    gpu: str  # its identity, "" for a rank on the CPU
    cut_off: list[str]  # the GPUs that it sees and whose memory its own cannot read
    nccl: bool


def location_of(device: torch.device) -> RankLocation:
    host, ipc = host_identity(), namespace_of("ipc")
    if device.type != "cuda":
        return RankLocation(host, ipc, "", [], False)
    others = [torch.device("cuda", i) for i in range(torch.cuda.device_count()) if i != device.index]
    cut_off = [o for o in others if not torch.cuda.can_device_access_peer(device, o)]
    nccl = torch.distributed.is_nccl_available()
    return RankLocation(host, ipc, card_identity(device), [card_identity(other) for other in cut_off], nccl)


def choose_kind(wanted: str, mine: RankLocation, theirs: RankLocation, *, failed: bool = False) -> str:
    """The same for both ends. NCCL refuses two ranks on one GPU, gloo carries no GPU tensors.

    CUDA IPC is chosen where nothing speaks against it. A rank may not see the other's GPU and then knows nothing of it:
    a trial copy decides (`CudaIpcChannel.try_out`); `failed` says that it did not arrive.
    """
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
    cut_off = theirs.gpu in mine.cut_off or mine.gpu in theirs.cut_off
    readable = together and mine.ipc == theirs.ipc and not cut_off and not failed
    apart = mine.gpu != theirs.gpu and mine.nccl and theirs.nccl
    if wanted == GLOO:
        return STAGED
    if wanted in (CUDA_IPC, SHARED_MEMORY):
        if not readable:
            reason = "failed to, in a trial" if failed else "cannot"
            raise PeerError(
                f"channel {wanted} needs GPUs of one host that read each other's memory, and {mine.gpu} and "
                f"{theirs.gpu} {reason}: use 'auto'"
            )
        return CUDA_IPC
    if wanted == NCCL:
        # Ranks that share a GPU have nothing but CUDA IPC.
        return NCCL if apart else CUDA_IPC if readable else STAGED
    return CUDA_IPC if readable else NCCL if apart else STAGED
