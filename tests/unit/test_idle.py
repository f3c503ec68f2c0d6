"""Which of the ranks that another launcher has started are idle, and what the others take for the run."""

import os
import threading

import pytest

from vpipe.communication.rendezvous import client as rendezvous_client
from vpipe.communication.rendezvous.client import RendezvousAddress, RendezvousClient
from vpipe.communication.rendezvous.server import Rendezvous
from vpipe.config import RunConfig
from vpipe.errors import PeerError
from vpipe.launch.idle import is_idle
from vpipe.launch.local import listen_here

SIZES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "VPIPE_IDLE")


@pytest.mark.parametrize(
    ("started", "expected"),
    [
        # two hosts of torchrun, two ranks each, of which the last is idle
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, ["3", "2", "1"]),
        ({"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, ["3", "1", "1"]),
        ({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, None),
        # srun deals tasks to the nodes like cards
        (
            {
                "RANK": "1",
                "LOCAL_RANK": "0",
                "WORLD_SIZE": "4",
                "LOCAL_WORLD_SIZE": "2",
                "SLURM_GTIDS": "1,3",
            },
            ["3", "1", "1"],
        ),
        # none was started for the idle rank
        ({"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}, ["3", "3", ""]),
        ({"RANK": "1", "WORLD_SIZE": "4"}, ["3", "", "1"]),
    ],
)
def test_the_run_consists_of_the_ranks_that_have_stages(
    started: dict[str, str], expected: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK", "SLURM_GTIDS", *SIZES):
        monkeypatch.delenv(name, raising=False)
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    config = RunConfig(stages=3)
    config._idle = 1
    assert is_idle(config) == (expected is None)
    if expected is not None:
        assert [os.environ.get(name, "") for name in SIZES] == expected


@pytest.mark.parametrize("well", [True, False])
def test_an_idle_rank_is_told_how_the_run_ends(well: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no value to gather, and nobody is kept waiting by its own end. Other ranks go before the end."""
    monkeypatch.setattr(rendezvous_client, "IDLE_WAIT", 0.05)
    listener = listen_here(0)
    place = RendezvousAddress(*listener.getsockname(), b"secret")
    server = Rendezvous(listener, 2, b"secret", 1)
    first, second, idle, wrong, stranger = (
        RendezvousClient(rank, lambda: place, 60.0) for rank in (0, 1, 2, 2, 3)
    )
    try:
        with pytest.raises(PeerError, match="rank 2, which the plan leaves idle, did not come"):
            first.wait_for_idle(2, 0.05)
        idle.come_as_idle()
        first.wait_for_idle(2, 60.0)
        for refused in (wrong, stranger):
            with pytest.raises(PeerError):
                refused.come_as_idle()
        with pytest.raises(PeerError):
            idle.gather("key", 2, "something", 1.0)
        waiting = RendezvousClient(2, lambda: place, 60.0)
        waiting._me = idle._me
        ended: list[str] = []

        def wait() -> None:
            try:
                waiting.wait_for_end()
                ended.append("well")
            except PeerError as error:
                ended.append(str(error))

        thread = threading.Thread(target=wait)
        thread.start()
        gathered: list[list[int]] = []
        other = threading.Thread(target=lambda: gathered.append(second.gather("key", 1, "something", 60.0)))
        other.start()
        assert first.gather("key", 0, "something", 60.0) == [0, 1]
        other.join(60.0)
        assert gathered == [[0, 1]]
        second.close()
        thread.join(0.2)
        assert thread.is_alive()
        if well:
            first.tell_end()
        else:
            server.close()
        thread.join(60.0)
        (how,) = ended
        assert how.startswith("well" if well else "rank 0, which serves the rendezvous, has gone")
    finally:
        for each in (first, second, idle, wrong, stranger):
            each.close()
        server.close()
