"""The device of each rank: one card for each, unless somebody has named a card for several."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch

from vpipe.communication.world import World, agree
from vpipe.errors import PeerError
from vpipe.system.cores import bind_to_gpu, share_compile_threads
from vpipe.system.device import card_identity, choose_device, is_named
from vpipe.system.host_identity import host_identity


class Taken(NamedTuple):
    """The device that a rank has taken."""

    host: str
    process: int
    device: str
    card: str  # its identity, "" for the CPU
    named: bool  # by `machines`, the launcher or `device=`


def take_device(world: World, wanted: str | torch.device | None = None) -> torch.device:
    """This rank's device. Every rank calls it; the error that two ranks took one card is raised by all of them.

    A rank that is a process is bound to the cores beside its card.
    """
    host = host_identity()
    hosts = world.all_gather("host", [host, world.local_rank])
    number = number_on_host(world.rank, hosts)
    device = agree(world, "device", lambda: choose_device(wanted, number))
    mine = Taken(host, os.getpid(), str(device), card_identity(device), is_named(wanted))
    ranks = [Taken(*taken) for taken in world.all_gather("card", list(mine))]
    check_cards(ranks)
    if len({(taken.host, taken.process) for taken in ranks}) == world.size:  # processes, not threads of one
        share_compile_threads(sum(taken.host == host for taken in ranks))
        bind_to_gpu(device)
    return device


def number_on_host(rank: int, ranks: Sequence[tuple[str, int | None]]) -> int:
    """A rank's number among those of its host, of which each has what its launcher says.

    Their order says it where the launcher does not, or gives several the same: processes that one task has started.
    """
    host, number = ranks[rank]
    given = [other for where, other in ranks if where == host]
    if number is not None and None not in given and len(set(given)) == len(given):
        return number
    return sum(where == host for where, _ in ranks[:rank])


def check_cards(ranks: Sequence[Taken]) -> None:
    """Two processes may compute on one card only if it was named for both. Threads of one process share theirs."""
    first: dict[str, int] = {}
    for rank, mine in enumerate(ranks):
        other = first.setdefault(mine.card, rank) if mine.card else rank
        theirs = ranks[other]
        if (mine.host, mine.process) == (theirs.host, theirs.process) or (mine.named and theirs.named):
            continue
        raise PeerError(
            f"ranks {other} and {rank} both took the GPU {mine.card} ({theirs.device} and {mine.device}) of host "
            f"{mine.host.partition('/')[0]}: start as many ranks on a host as it has GPUs and show each its own "
            "(LOCAL_RANK, SLURM_LOCALID, CUDA_VISIBLE_DEVICES); if they are to share it, name it for each of them in "
            "`machines`, or as device= of Pipeline"
        )
