"""Signals to a rank that trains."""

import os
import signal
from collections.abc import Iterator

import pytest

from tests.unit.test_requests import Clock
from tests.waiting import wait_until
from vpipe.train import signals
from vpipe.train.signals import Signals

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class FakePipeline:
    def __init__(self) -> None:
        self.requests: list[str] = []

    def request_save(self) -> None:
        self.requests.append("save")

    def request_stop(self) -> None:
        self.requests.append("stop")


@pytest.fixture
def pipe() -> FakePipeline:
    return FakePipeline()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(signals, "time", made)
    return made


@pytest.fixture
def listening(pipe: FakePipeline, said: list[str]) -> Iterator[Signals]:
    made = Signals(pipe, said.append)
    made.listen()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("number", "request_made"), [(signal.SIGUSR1, "save"), (signal.SIGTERM, "stop"), (signal.SIGINT, "stop")]
)
@pytest.mark.usefixtures("listening")
def test_a_signal_is_a_request(pipe: FakePipeline, said: list[str], number: int, request_made: str) -> None:
    os.kill(os.getpid(), number)
    wait_until(lambda: len(pipe.requests))
    assert pipe.requests == [request_made]
    assert signal.Signals(number).name in said[0]


@pytest.mark.usefixtures("listening")
def test_a_second_signal_quits_at_once_unless_it_is_the_first_passed_on(
    clock: Clock, pipe: FakePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    os.kill(os.getpid(), signal.SIGINT)
    wait_until(lambda: pipe.requests == ["stop"])
    clock.now += signals.AGAIN
    os.kill(os.getpid(), signal.SIGTERM)  # a launcher's, for the same Ctrl-C
    os.kill(os.getpid(), signal.SIGUSR1)
    wait_until(lambda: pipe.requests == ["stop", "save"])  # it was heard after the other
    assert codes == []
    clock.now += 0.1
    os.kill(os.getpid(), signal.SIGTERM)
    wait_until(lambda: len(codes))
    assert codes == [128 + signal.SIGTERM]


def test_handlers_are_restored(pipe: FakePipeline, said: list[str]) -> None:
    before = [signal.getsignal(number) for number in NUMBERS]
    made = Signals(pipe, said.append)
    made.listen()
    made.close()
    assert [signal.getsignal(number) for number in NUMBERS] == before


def test_signals_are_handed_over_without_a_gap(pipe: FakePipeline, said: list[str]) -> None:
    before = {number: signal.getsignal(number) for number in NUMBERS}
    heard: list[str] = []
    signal.signal(signal.SIGTERM, lambda *_: heard.append("the one before"))
    made = Signals(pipe, said.append)
    made.listen()

    def take() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, lambda *_: heard.append("the one after"))

    try:
        made.hand_over(take)
        made.close()
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == ["the one after"]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
