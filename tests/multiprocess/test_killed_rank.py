"""A rank that is killed in the middle of training: the others say so, by its end and not by a timeout, and name it."""

import os
import signal
import socket
from itertools import product

import pytest
import torch

from tests.multiprocess import tasks
from tests.multiprocess.pool import Pool
from vpipe.communication.channel import Key
from vpipe.communication.shared_memory import SharedMemoryChannel
from vpipe.errors import PeerError


def _train_until_killed(schedule: str, channel: str, victim: int, replicas: tuple[int, ...]) -> str:
    """The error of the rank that survives."""
    with tasks.make_pipeline(schedule, channel=channel, replicas=replicas, timeout=600.0) as pipe:
        try:
            for update, _ in pipe.train(tasks.batches(400)):
                if pipe.rank == victim and update == 4:
                    os.kill(os.getpid(), signal.SIGKILL)
        except PeerError as error:
            return str(error)
    return "nothing"


SHORT = [("1f1b", "gloo", 0), ("pipedream", "shared_memory", 1)]
LONG = set(product(("1f1b", "pipedream"), ("gloo", "shared_memory"), (0, 1))) - set(SHORT)


@pytest.mark.parametrize(
    ("schedule", "channel", "victim"),
    [*SHORT, *(pytest.param(*case, marks=pytest.mark.long) for case in sorted(LONG))],
)
def test_the_other_rank_names_the_killed_one(
    own_pool: Pool, schedule: str, channel: str, victim: int
) -> None:
    outcomes = own_pool.outcomes(2, _train_until_killed, schedule, channel, victim, (1, 1))
    assert outcomes[victim].error == "Killed"
    survivor = outcomes[1 - victim]
    assert survivor.error is None, survivor
    assert f"rank {victim} " in survivor.value


def test_all_other_ranks_end(own_pool: Pool) -> None:
    outcomes = own_pool.outcomes(3, _train_until_killed, "pipedream", "shared_memory", 2, (2, 1))
    assert [outcome.error for outcome in outcomes] == [None, None, "Killed"]
    for survivor in outcomes[:2]:
        assert "closed its connection" in survivor.value


def test_a_message_to_a_rank_that_has_gone_names_it() -> None:
    """Whether a survivor is sending or waiting when it notices is a matter of chance above."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = SharedMemoryChannel(1, 2, 600.0, here)
    there.close()
    with pytest.raises(PeerError, match="rank 1 closed its connection"):
        channel.send(Key(0, 0), torch.ones(3))
    channel.close()
