"""Waiting for what will happen, however busy the machine is."""

import time
from collections.abc import Callable
from typing import TypeVar

TIMEOUT = 220
"""Seconds, also of a machine that is busy with others: they only end a test that would hang."""
T = TypeVar("T")


def wait_until(happened: Callable[[], T], what: str = "what was to happen") -> T:
    """What it returns, once that is true."""
    deadline = time.monotonic() + TIMEOUT
    while not (found := happened()):
        assert time.monotonic() < deadline, f"{what}: not within {TIMEOUT} s"
        time.sleep(0.01)
    return found
