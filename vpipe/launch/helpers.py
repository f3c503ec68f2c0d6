"""Helper processes of the launcher: found when they are stopped or gone, and never waited for without a limit.

A helper works when the launcher has ended, so nothing else would show that it cannot. One that is stopped is continued,
with a warning; a run does not depend on it and goes on.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

INTERVAL = 0.1
"""Seconds between two looks."""
END_LIMIT = 10.0
"""Seconds that a helper has to end when it is asked to; then it is killed."""

_helpers: dict[int, tuple[str, str]] = {}  # process ▶ its name, and what does not happen without it


@contextmanager
def helping(process: int, name: str, use: str) -> Iterator[None]:
    """`HelperWatch` looks at this process meanwhile; `use` says what does not happen without it."""
    _helpers[process] = f"{name} (process {process})", use
    try:
        yield
    finally:
        del _helpers[process]


class HelperWatch:
    """Looks at the helpers; `limit` is the heartbeat limit."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._looked = 0.0
        self._stopped: dict[int, float] = {}  # since when
        self._gone: set[int] = set()

    def look(self) -> None:
        now = time.monotonic()
        if now - self._looked < INTERVAL:
            return
        self._looked = now
        for process, (name, use) in _helpers.items():
            state = state_of(process)
            if state != "T":
                self._stopped.pop(process, None)
            if state == "T" and now - self._stopped.setdefault(process, now) > self._limit / 2:
                seconds = now - self._stopped.pop(process)
                _tell(f"{name} was stopped (SIGSTOP) for {seconds:.1f} s: it is continued")
                os.kill(process, signal.SIGCONT)
            if state in ("", "Z") and process not in self._gone:
                self._gone.add(process)
                _tell(f"{name} has ended before its time: {use}")


def end_helper(process: int, name: str, ended: Callable[[], bool]) -> bool:
    """Wait for a helper that was asked to end; False if it had to be killed."""
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGCONT)
    deadline = time.monotonic() + END_LIMIT
    in_time = True
    while not ended():
        if in_time and time.monotonic() > deadline:
            in_time = False
            _tell(f"{name} (process {process}) did not end within {END_LIMIT:g} s: it is killed")
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)
    return in_time


def state_of(process: int) -> str:
    """One letter, as the kernel has it: T stopped, Z ended; "" for a process that does not exist."""
    try:
        return Path("/proc", str(process), "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _tell(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
