"""Requests: what signals, the clock and other ranks ask of a run."""

import os
import signal
from collections.abc import Iterator

import pytest

from tests.waiting import wait_until
from vpipe.communication import InProcessHub
from vpipe.train import requests
from vpipe.train.requests import GIVE_UP, SAVE, STOP, Requests


@pytest.fixture
def said() -> list[str]:
    return []


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(requests, "time", made)
    return made


@pytest.fixture
def leader(said: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Requests]:
    """Of two ranks, the one that listens in this process."""
    monkeypatch.setattr(requests, "LOOK", 0.02)
    made = Requests(InProcessHub(2).join(0), 0, say=said.append)
    made.listen()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("number", "asked"), [(signal.SIGUSR1, SAVE), (signal.SIGTERM, STOP), (signal.SIGINT, STOP)]
)
def test_a_signal_asks_once(leader: Requests, said: list[str], number: int, asked: int) -> None:
    os.kill(os.getpid(), number)
    assert wait_until(leader.take) == asked
    assert leader.take() == 0
    assert signal.Signals(number).name in said[0]


def test_a_second_signal_quits_at_once_unless_it_is_the_first_passed_on(
    clock: Clock, leader: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    os.kill(os.getpid(), signal.SIGINT)
    assert wait_until(leader.take) == STOP
    clock.now += requests.AGAIN
    os.kill(os.getpid(), signal.SIGTERM)  # a launcher's, for the same Ctrl-C
    os.kill(os.getpid(), signal.SIGUSR1)
    assert wait_until(leader.take) == SAVE  # it was heard after the other
    assert codes == []
    clock.now += 0.1
    os.kill(os.getpid(), signal.SIGTERM)
    wait_until(lambda: len(codes))
    assert codes == [128 + signal.SIGTERM]


def test_an_end_that_another_rank_was_asked_for_reaches_the_leader(
    monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr(requests, "LOOK", 0.02)
    hub = InProcessHub(2)
    leads, follows = (Requests(hub.join(rank), 0, say=said.append) for rank in range(2))
    leads.listen()
    try:
        follows.ask(SAVE)  # a matter of whoever was asked
        follows.ask(STOP)
        assert wait_until(leads.take) == STOP
    finally:
        leads.close()


def test_the_leader_keeps_the_time(clock: Clock, said: list[str]) -> None:
    hub = InProcessHub(2)
    leads, follows = (Requests(hub.join(rank), 0, minutes=10, say=said.append) for rank in range(2))
    clock.now += 599
    assert leads.take() == 0
    clock.now += 1
    assert (leads.take(), follows.take()) == (SAVE, 0)
    assert leads.take() == 0
    clock.now += 599
    leads.saved()  # for another reason: the ten minutes begin again
    clock.now += 599
    assert leads.take() == 0
    clock.now += 1
    assert leads.take() == SAVE


def test_requests_add_up(said: list[str]) -> None:
    alone = Requests(InProcessHub(1).join(0), 0, say=said.append)
    alone.ask(SAVE)
    alone.ask(GIVE_UP)
    assert alone.take() == SAVE | GIVE_UP


def test_signals_do_again_what_they_did_before(said: list[str]) -> None:
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    alone = Requests(InProcessHub(1).join(0), 0, say=said.append)
    alone.listen()
    alone.close()
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == before


def test_signals_are_left_to_another_without_a_gap(said: list[str]) -> None:
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    heard: list[str] = []
    signal.signal(signal.SIGTERM, lambda *_: heard.append("who was before"))
    alone = Requests(InProcessHub(1).join(0), 0, say=said.append)
    alone.listen()

    def take() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, lambda *_: heard.append("who took them"))

    try:
        alone.leave_to(take)
        alone.close()
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == ["who took them"]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
