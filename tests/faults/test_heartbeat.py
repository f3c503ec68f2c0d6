"""Heartbeats between ranks that no launcher watches: silence, a sudden end and an error are distinguished.

The ranks are processes that do nothing else; `test_network.py` cuts a real network.
"""

import multiprocessing
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_until
from vpipe.communication import heartbeat
from vpipe.communication.heartbeat import Heartbeat, connect_heartbeat

NEVER = 100_000.0
"""Seconds: a limit that does not expire. Heartbeats are a twentieth of it apart: no test waits for the next one."""
FOUND = 5.0
"""Seconds of silence after which a rank is lost; a busy machine keeps none from the processor for so long."""


def _rank(rank: int, size: int, limit: float, pipe: Connection, log: str, what: str) -> None:
    """Send heartbeats until stopped."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    heartbeat.EXIT_WAIT = 0.1

    def gather(name: str, mine: Any) -> list[Any]:
        pipe.send(mine)
        return pipe.recv()

    own = connect_heartbeat(rank, [socket.gethostname()] * size, ("127.0.0.1", 1), gather, limit)
    pipe.send("connected")
    pipe.recv()
    if what == "leave":
        own.close()
    elif what == "fail":
        with suppress(RuntimeError):
            try:
                raise RuntimeError("all is lost")
            finally:
                own.close()
    elif what == "stay":
        while own._links:
            time.sleep(0.01)
        own.close()
    else:
        time.sleep(600)
    pipe.send(Heartbeat.failure)


class Job:
    def __init__(self, folder: Any, behaviour: list[str], limit: float) -> None:
        context = multiprocessing.get_context("fork")
        size = len(behaviour)
        ends = [context.Pipe() for _ in behaviour]
        self.logs = [folder / f"log.{rank}" for rank in range(size)]
        self.pipes = [here for here, _ in ends]
        self.ranks = [
            context.Process(
                target=_rank, args=(r, size, limit, ends[r][1], str(self.logs[r]), behaviour[r]), daemon=True
            )
            for r in range(size)
        ]
        for rank in self.ranks:
            rank.start()
        self._gathered = [pipe.recv() for pipe in self.pipes]
        self.addresses = [address for address, _ in self._gathered]

    def begin(self) -> None:
        for pipe in self.pipes:
            pipe.send(self._gathered)
        assert [pipe.recv() for pipe in self.pipes] == ["connected"] * len(self.pipes)
        for pipe in self.pipes:
            pipe.send("go")

    def said(self, rank: int) -> str:
        self.ranks[rank].join()
        assert self.ranks[rank].exitcode == 3
        return self.logs[rank].read_text()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def make(*behaviour: str, limit: float = NEVER) -> Job:
        jobs.append(Job(tmp_path, list(behaviour), limit))
        return jobs[-1]

    yield make
    for made in jobs:
        for rank in made.ranks:
            rank.kill()
            rank.join()


@pytest.mark.parametrize(
    ("number", "limit", "how"),
    [
        (signal.SIGSTOP, FOUND, "no heartbeat for "),
        (signal.SIGKILL, NEVER, "its process ended and gave no reason"),
    ],
)
def test_all_others_name_the_one_that_fell_silent(
    number: int, limit: float, how: str, job: Callable[..., Job]
) -> None:
    made = job("wait", "wait", "wait", limit=limit)
    made.begin()
    os.kill(made.ranks[1].pid, number)
    for rank in (0, 2):
        said = made.said(rank)
        assert said.startswith("error: stopped because rank 1 failed: ")
        assert how in said
        assert socket.gethostname() in said


def test_the_error_of_a_rank_reaches_its_peers(job: Callable[..., Job]) -> None:
    made = job("wait", "fail")
    made.begin()
    assert "stopped because rank 1 failed: RuntimeError: all is lost" in made.said(0)


def test_a_rank_that_says_goodbye_is_not_lost(job: Callable[..., Job]) -> None:
    """The one that stays waits until it has no peer left to lose."""
    made = job("leave", "stay", "leave")
    made.begin()
    assert [pipe.recv() for pipe in made.pipes] == [""] * 3


def test_a_stranger_is_turned_away(job: Callable[..., Job]) -> None:
    made = job("stay", "leave")
    with socket.create_connection(made.addresses[0]) as stranger:  # before the rank whom it knows
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 64)
        made.begin()
    assert [pipe.recv() for pipe in made.pipes] == [""] * 2


def test_a_connection_that_breaks_off_ends_without_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a process that was killed before it had read all."""
    monkeypatch.setattr(heartbeat, "EXIT_WAIT", 600.0)  # it is this process that would end
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = socket.create_connection(listener.getsockname())
        link, _ = listener.accept()
    own = Heartbeat(0, {1: link}, ["here", "there"], NEVER)
    assert peer.recv(1)  # its first heartbeat: now it listens
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()
    wait_until(lambda: own.lost, "the loss")
    own.close()
    assert Heartbeat.failure == "rank 1 failed: its process ended and gave no reason (on there)"
    monkeypatch.setattr(Heartbeat, "failure", "")
