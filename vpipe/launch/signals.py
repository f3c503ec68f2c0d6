"""The signals of a launcher: to end, and to save."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

AGAIN = 1.0
"""Seconds within which a further signal counts as the same one: a key that is pressed twice."""


@dataclass
class LauncherSignals:
    """The signals that the launcher has received: to end, and to save."""

    to_end: list[int] = field(default_factory=list)
    first: float = 0.0  # when the first signal to end came
    to_save: int = 0


@contextmanager
def handling_signals() -> Iterator[LauncherSignals]:
    """The first signal to end is passed on: the ranks finish their step and save. The second ends all at once."""
    signals = LauncherSignals()

    def end(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        signals.first = signals.first or now
        if not signals.to_end or now - signals.first > AGAIN:
            signals.to_end.append(number)

    def save(number: int, frame: FrameType | None) -> None:
        signals.to_save += 1

    handlers = {signal.SIGINT: end, signal.SIGTERM: end, signal.SIGHUP: end, signal.SIGUSR1: save}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def ending_at_once() -> Iterator[None]:
    """A signal to end does so while there is no rank yet that it would be passed on to."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
