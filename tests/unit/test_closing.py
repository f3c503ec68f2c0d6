"""The end of a world: orderly after success, at once after a failure; heartbeats are the last that end."""

from typing import Any

import pytest

from vpipe.communication import HOST, ProcessWorld
from vpipe.communication.nccl import Communicators
from vpipe.errors import PeerError


class Group:
    """One of NCCL."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def shutdown(self) -> None:
        """Waits for all transfers; those with a rank that failed never end."""
        self.calls.append("wait for transfers")

    def abort(self) -> None:
        self.calls.append("transfers are aborted")


class Beats:
    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def close(self) -> None:
        self.calls.append("end of heartbeats")


@pytest.fixture
def calls() -> list[str]:
    return []


@pytest.fixture
def ours(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> ProcessWorld:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    made: Any = ProcessWorld()
    made._communicators = Communicators(0, 1, lambda name, ranks: Group(calls), HOST)  # type: ignore[arg-type,return-value]
    made._communicators._groups[0,] = Group(calls)
    made._heartbeat = Beats(calls)
    return made


def test_heartbeats_end_after_everything_that_may_wait(ours: ProcessWorld, calls: list[str]) -> None:
    ours.close()
    ours.close()
    assert calls == ["wait for transfers", "end of heartbeats"]


def test_after_a_failure_nothing_is_waited_for(ours: ProcessWorld, calls: list[str]) -> None:
    try:
        raise PeerError("rank 1 is gone")
    except PeerError:
        ours.close()
    assert calls == ["transfers are aborted", "end of heartbeats"]
