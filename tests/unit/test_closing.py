"""The end of a world: orderly after success, at once after a failure; heartbeats are the last that end."""

from typing import Any

import pytest

from vpipe.communication import ProcessWorld, world
from vpipe.errors import PeerError


class Recorded:
    """A group of NCCL, or the heartbeats."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def close(self) -> None:
        self.calls.append(f"end of {self.name}")

    def shutdown(self) -> None:
        """Waits for all transfers; those with a rank that failed never end."""
        self.calls.append(f"wait for {self.name}")


@pytest.fixture
def calls() -> list[str]:
    return []


@pytest.fixture
def ours(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> ProcessWorld:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(world, "_abandoned", [])
    made: Any = ProcessWorld()
    made._group_backend = "nccl"
    made._groups = [Recorded("transfers", calls)]
    made._heartbeat = Recorded("heartbeats", calls)
    return made


def test_heartbeats_end_after_everything_that_may_wait(ours: ProcessWorld, calls: list[str]) -> None:
    ours.close()
    ours.close()
    assert calls == ["wait for transfers", "end of heartbeats"]


def test_after_a_failure_nothing_is_waited_for(ours: ProcessWorld, calls: list[str]) -> None:
    group = ours._groups[0]
    try:
        raise PeerError("rank 1 is gone")
    except PeerError:
        ours.close()
    assert calls == ["end of heartbeats"]
    assert world._abandoned == [group]  # to free it would wait too
