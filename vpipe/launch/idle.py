"""The ranks that a plan leaves idle: torchrun and srun start them like the others, our own launcher does not.

An idle rank waits for the end of the run: if it ended at once, an agent of torchrun with no other rank would close the
rendezvous of all agents, and none of them could start its ranks again.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from vpipe.errors import PeerError, printable
from vpipe.system.environment import IDLE

if TYPE_CHECKING:
    from vpipe.config import RunConfig


def is_idle(config: RunConfig) -> bool:
    """Whether this rank has no stage. For a rank that has one, the run consists of such ranks from now on."""
    rank, started = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if not config.idle or started != config.ranks + config.idle:
        return False
    if rank >= config.ranks:
        return True
    os.environ |= {"WORLD_SIZE": str(config.ranks), IDLE: str(config.idle)}
    if "LOCAL_WORLD_SIZE" in os.environ:
        os.environ["LOCAL_WORLD_SIZE"] = str(sum(other < config.ranks for other in _ranks_here(rank)))
    return False


def _ranks_here(rank: int) -> list[int]:
    """All ranks of this host: SLURM lists them, torchrun numbers them one after the other."""
    if "SLURM_GTIDS" in os.environ:
        return list(map(int, os.environ["SLURM_GTIDS"].split(",")))
    first = rank - int(os.environ["LOCAL_RANK"])
    return list(range(first, first + int(os.environ["LOCAL_WORLD_SIZE"])))


@contextmanager
def telling_idle_ranks() -> Iterator[None]:
    """Around the work of a rank that has stages."""
    try:
        yield
    except SystemExit:  # it was asked to end, and has saved
        _tell()
        raise
    _tell()


def _tell() -> None:
    if IDLE in os.environ and os.environ["RANK"] == "0":
        from vpipe.communication.rendezvous.job import tell_idle_ranks

        tell_idle_ranks()


def wait_as_idle(config: RunConfig) -> None:
    """Return when the run has ended as it should, or was asked to; raise when it has failed.

    Then torchrun starts this rank again with the others. A signal to end is for these, a second one ends this rank too.
    """
    from vpipe.communication.rendezvous.job import join  # with torch

    rank, started = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    plan = "the plan" if config.planned is None else config.planned[0]
    print(
        printable(
            f"rank {rank} is idle: {plan} uses {config.ranks} of {started} ranks; it waits for the end of the run"
        ),
        flush=True,
    )
    client = join(rank, started, config.rendezvous_limit).client
    client.come_as_idle()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _first_signal)
    try:
        client.wait_for_end()
    except PeerError:
        raise PeerError(
            f"rank {rank}, which is idle, ends because the run has failed: see the other ranks"
        ) from None


def _first_signal(number: int, frame: FrameType | None) -> None:
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_DFL)
