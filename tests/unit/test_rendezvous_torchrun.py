"""The rendezvous under torchrun: each agent counts the restarts that it began itself, so the numbers may differ."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from vpipe.communication.rendezvous.client import RendezvousClient
from vpipe.communication.rendezvous.job import _open
from vpipe.communication.rendezvous.server import Rendezvous
from vpipe.errors import PeerError

PATIENT = 100.0


@pytest.fixture
def _agents_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The store of torchrun, which all attempts share."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    yield
    del store


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("_agents_store")
def test_agents_that_have_counted_different_restarts_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(rank: int, restarts: int) -> tuple[RendezvousClient, Rendezvous | None]:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        find, rendezvous = _open(rank, 2, PATIENT)
        return RendezvousClient(rank, find, PATIENT), rendezvous

    client, earlier = begin(0, 0)
    assert earlier is not None
    client.change("set", "seen", "by the first attempt")
    client.close()
    earlier.close()
    # The agent of rank 1 began both restarts, that of rank 0 joined in; rank 1 comes first.
    second, _ = begin(1, 2)
    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(second.gather, "model", 1, "model", PATIENT)
        first, rendezvous = begin(0, 1)
        assert rendezvous is not None
        assert first.gather("model", 0, "model", PATIENT) == [0, 1]
        assert waiting.result(PATIENT) == [0, 1]
        assert not first.change("check", "seen")
    for made in (first, second, rendezvous):
        made.close()


@pytest.mark.timeout(60)
def test_a_store_that_has_gone_is_not_taken_for_a_late_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is in a process of its own, which is killed while a rank waits."""
    code = (
        "import torch.distributed as dist, time\n"
        "store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
        "print(store.port, flush=True)\n"
        "time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        port = agent.stdout.readline().decode().strip()
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", port)
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        find, _ = _open(1, 2, PATIENT)
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(find)
            agent.kill()
            with pytest.raises(PeerError, match=f"torch's store at 127.0.0.1:{port} has gone"):
                waiting.result(PATIENT)
