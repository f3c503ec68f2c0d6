"""A rank that is killed in the middle of training: the others say so, at once, and name it."""

import os
import signal
import time

import pytest

from tests.multiprocess import tasks
from tests.multiprocess.pool import Pool
from vpipe.errors import PeerError

pytestmark = pytest.mark.timeout(60)


def _train_until_killed(
    schedule: str, channel: str, victim: int, replicas: tuple[int, ...]
) -> tuple[str, float]:
    """What the survivor was told, and how long after its last update."""
    with tasks.make_pipeline(schedule, channel=channel, replicas=replicas) as pipe:
        latest = time.monotonic()
        try:
            for update, _ in pipe.train(tasks.batches(400)):
                latest = time.monotonic()
                if pipe.rank == victim and update == 4:
                    os.kill(os.getpid(), signal.SIGKILL)
        except PeerError as error:
            return str(error), time.monotonic() - latest
    return "nothing", 0.0


@pytest.mark.parametrize("channel", ["gloo", "shared_memory"])
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
@pytest.mark.parametrize("victim", [0, 1])
def test_the_other_rank_names_the_killed_one(pool: Pool, schedule: str, channel: str, victim: int) -> None:
    outcomes = pool.outcomes(2, _train_until_killed, schedule, channel, victim, (1, 1), timeout=30)
    assert outcomes[victim].error == "Killed"
    survivor = outcomes[1 - victim]
    assert survivor.error is None, survivor
    text, seconds = survivor.value
    assert f"rank {victim} " in text
    assert seconds < 5


def test_all_other_ranks_end(pool: Pool) -> None:
    outcomes = pool.outcomes(3, _train_until_killed, "pipedream", "shared_memory", 2, (2, 1), timeout=30)
    assert [outcome.error for outcome in outcomes] == [None, None, "Killed"]
    for survivor in outcomes[:2]:
        text, seconds = survivor.value
        assert "closed its connection" in text
        assert seconds < 5
