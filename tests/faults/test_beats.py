"""Beats between ranks that no launcher watches: silence, a sudden end and last words are told apart.

The ranks are processes that do nothing but beat; `test_network.py` cuts a real network.
"""

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from vpipe.communication.beats import TO_END, Beats, connect_beats

LIMIT = 1.0
pytestmark = pytest.mark.timeout(60)


def _rank(rank: int, size: int, pipe: Connection, log: str, what: str) -> None:
    """Beat until told otherwise."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)

    def gather(name: str, mine: Any) -> list[Any]:
        pipe.send(mine)
        return pipe.recv()

    beats = connect_beats(rank, size, ("127.0.0.1", 1), gather, LIMIT)
    pipe.send("beating")
    pipe.recv()
    if what == "leave":
        beats.close()
    elif what == "fail":
        with suppress(RuntimeError):
            try:
                raise RuntimeError("all is lost")
            finally:
                beats.close()
    else:
        time.sleep(30)
    pipe.send(Beats.verdict)


class Job:
    def __init__(self, folder: Any, behaviour: list[str]) -> None:
        context = multiprocessing.get_context("fork")
        size = len(behaviour)
        ends = [context.Pipe() for _ in behaviour]
        self.logs = [folder / f"log.{rank}" for rank in range(size)]
        self.pipes = [here for here, _ in ends]
        self.ranks = [
            context.Process(
                target=_rank, args=(r, size, ends[r][1], str(self.logs[r]), behaviour[r]), daemon=True
            )
            for r in range(size)
        ]
        for rank in self.ranks:
            rank.start()
        gathered = [pipe.recv() for pipe in self.pipes]
        self.addresses = [(host, port) for host, port, *_ in gathered]
        for pipe in self.pipes:
            pipe.send(gathered)

    def begin(self) -> None:
        assert [pipe.recv() for pipe in self.pipes] == ["beating"] * len(self.pipes)
        for pipe in self.pipes:
            pipe.send("go")

    def said(self, rank: int, within: float) -> str:
        self.ranks[rank].join(within)
        assert self.ranks[rank].exitcode == 3
        return self.logs[rank].read_text()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def make(*behaviour: str) -> Job:
        jobs.append(Job(tmp_path, list(behaviour)))
        return jobs[-1]

    yield make
    for made in jobs:
        for rank in made.ranks:
            rank.kill()
            rank.join()


@pytest.mark.parametrize(
    ("number", "how"),
    [(signal.SIGSTOP, "not heard of for "), (signal.SIGKILL, "it ended without a word")],
)
def test_all_others_name_the_one_that_fell_silent(number: int, how: str, job: Callable[..., Job]) -> None:
    made = job("wait", "wait", "wait")
    made.begin()
    time.sleep(2 * LIMIT)
    assert all(rank.is_alive() for rank in made.ranks)
    os.kill(made.ranks[1].pid, number)
    started = time.monotonic()
    for rank in (0, 2):
        said = made.said(rank, 10)
        assert said.startswith("error: stopped because rank 1 failed: ")
        assert how in said
        assert socket.gethostname() in said
    assert time.monotonic() - started < LIMIT + TO_END + 1


def test_last_words_are_passed_on(job: Callable[..., Job]) -> None:
    made = job("wait", "fail")
    made.begin()
    assert "stopped because rank 1 failed: RuntimeError: all is lost" in made.said(0, 10)


def test_who_says_goodbye_is_not_missed(job: Callable[..., Job]) -> None:
    made = job("leave", "wait", "leave")
    made.begin()
    for rank in (0, 2):
        assert made.pipes[rank].recv() == ""
    time.sleep(2 * LIMIT)
    assert made.ranks[1].is_alive()


def test_a_stranger_is_turned_away(job: Callable[..., Job]) -> None:
    made = job("wait", "wait")
    with suppress(OSError), socket.create_connection(made.addresses[0], timeout=1) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 64)
    made.begin()
    time.sleep(LIMIT)
    assert all(rank.is_alive() for rank in made.ranks)
