"""Limits on waiting: the time for which the process itself did not run is not counted."""

import select
import socket
import threading
from contextlib import closing
from types import SimpleNamespace

import pytest

from tests.waiting import wait_until
from vpipe.communication.shared_memory import SharedMemoryChannel
from vpipe.communication.sockets import receive_exactly
from vpipe.errors import PeerError
from vpipe.system import deadline
from vpipe.system.deadline import Deadline


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 50.0
        monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: self.now))


def test_a_minute_in_which_nothing_ran_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    limit = Deadline(10.0)
    for second in range(4):
        assert limit.left() == 10.0 - second
        assert limit.slice() == deadline.SLICE
        clock.now += 1.0
    clock.now += 60.0
    assert limit.left() == 10.0 - 3.0 - deadline.LONGEST
    clock.now += 3.5
    assert limit.left() == 1.0
    clock.now += 0.75
    assert limit.slice() == 0.25
    clock.now += 0.25
    assert limit.left() == limit.slice() == 0.0


def test_a_limit_ends_when_it_should_without_a_pause() -> None:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = SharedMemoryChannel(1, 2, 0.2, left)
    with left, right, pytest.raises(PeerError, match=r"waited 0.2 s for rank 1: a message"):
        channel._wait(lambda: False, "a message")
    here, there = socket.socketpair()
    with here, there, pytest.raises(TimeoutError):
        receive_exactly(here, 1, Deadline(0.1))


def test_a_channel_survives_a_pause_that_is_longer_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock jumps by an hour while a rank waits, as it does for a process that was stopped."""
    now, asked = 50.0, 0

    def monotonic() -> float:
        nonlocal asked
        asked += 1
        return now

    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=monotonic))
    monkeypatch.setattr(deadline, "SLICE", 0.001)
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def jump() -> None:
        nonlocal now
        wait_until(lambda: asked > 5)
        now += 3600.0
        before = asked
        wait_until(lambda: asked > before + 5)  # it still waits
        right.send(b"x")

    with right, closing(SharedMemoryChannel(1, 2, 8.0, left)) as channel:
        thread = threading.Thread(target=jump)
        thread.start()
        channel._wait_for(select.POLLIN, Deadline(channel.timeout), "a message")
        thread.join()
    assert now == 3650.0
