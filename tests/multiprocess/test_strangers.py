"""Row 13 of docs/reliability.md with real processes: strangers at the port while two ranks train; who listens where."""

import os
import socket
import threading
from pathlib import Path

import pytest

from tests.multiprocess import tasks
from tests.multiprocess.pool import Pool
from vpipe.errors import PeerError

UPDATES = 12
LISTENING = "0A"
LOOPBACK, LOOPBACK_6 = "0100007F", "00000000000000000000000001000000"


def _train(channel: str, strangers: bool) -> tuple[list[float], int, set[str]]:
    """The losses, how often a stranger was turned away, and the addresses that this process listens on."""
    os.environ["VPIPE_SECRET"] = "of the tests"
    turned_away = 0
    done = threading.Event()

    def disturb() -> None:
        nonlocal turned_away
        while not turned_away or not done.is_set():
            with socket.create_connection(("127.0.0.1", int(os.environ["MASTER_PORT"])), 100) as link:
                try:
                    link.sendall(os.urandom(200))
                    while link.recv(1000):
                        pass
                except ConnectionError:
                    pass
                turned_away += 1

    try:
        with tasks.make_pipeline("pipedream", channel=channel) as pipe:
            stranger = threading.Thread(target=disturb) if strangers and pipe.rank == 1 else None
            if stranger is not None:
                stranger.start()
            losses = [loss for _, loss in pipe.train(tasks.batches(UPDATES))]
            pipe.evaluate(tasks.batches(2))  # ranks meet again
            done.set()
            if stranger is not None:
                stranger.join()
            return losses, turned_away, _listening()
    finally:
        del os.environ["VPIPE_SECRET"]


def _listening() -> set[str]:
    """The addresses of this process's listening TCP sockets."""
    own = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            own.add(os.readlink(descriptor))
        except OSError:
            continue  # the one that listed them
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTENING and f"socket:[{inode}]" in own:
                found.add(local.partition(":")[0])
    return found


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="needs /proc")
@pytest.mark.parametrize("channel", ["shared_memory", "gloo"])
def test_row_13_strangers_do_not_disturb_a_training_and_reach_loopback_only(pool: Pool, channel: str) -> None:
    alone = pool.run(2, _train, channel, False)
    disturbed = pool.run(2, _train, channel, True)
    assert disturbed[0][0] == disturbed[1][0] == alone[0][0]
    assert disturbed[1][1] > 0
    for _, _, addresses in (*alone, *disturbed):
        assert addresses <= {LOOPBACK, LOOPBACK_6}


def _join_as(secret: str, limit: float) -> str:
    """Rank 1 comes with another job's secret; rank 0 waits for it for so long."""
    first = os.environ["RANK"] == "0"
    os.environ["VPIPE_SECRET"] = "of this job" if first else secret
    try:
        with tasks.make_pipeline("pipedream", timeout=limit if first else 100.0):
            return "joined"
    except PeerError as error:
        return str(error)
    finally:
        del os.environ["VPIPE_SECRET"]


def test_row_12_a_rank_of_another_job_never_joins(pool: Pool) -> None:
    first, second = pool.run(2, _join_as, "of another job", 0.3)
    assert "rank 1 did not come" in first
    assert "belongs to another job and turned rank 1 away" in second
    assert pool.run(2, _join_as, "of this job", 100.0) == ["joined", "joined"]
