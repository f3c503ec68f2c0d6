"""The start of a process: the seconds that each phase takes until the first update, and the collector meanwhile."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

VARIABLE = "VPIPE_PHASES"
"""Set for a rank: the phases of its launcher, as JSON."""


class Phases:
    """Phases that follow each other; the seconds of each, in order. One that comes again goes on counting."""

    def __init__(
        self, first: str, since: float | None = None, before: Mapping[str, float] | None = None
    ) -> None:
        """`since`: when the first began, by the monotonic clock; default: now. `before`: phases that have ended."""
        self.seconds = dict(before or {})
        self._current: str | None = first
        self._since = time.monotonic() if since is None else since

    def begin(self, name: str) -> None:
        """This phase begins, and the one before ends."""
        self.end()
        self._current = name

    @property
    def running(self) -> bool:
        return self._current is not None

    def end(self) -> None:
        now = time.monotonic()
        if self._current is not None:
            self.seconds[self._current] = self.seconds.get(self._current, 0.0) + now - self._since
        self._current, self._since = None, now

    def include(self, seconds: Mapping[str, float]) -> None:
        """What somebody else has measured, in place of the current phase."""
        self._current = None
        self.end()
        for name, value in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + value

    def move(self, name: str, seconds: float) -> None:
        """So much of the phase that ended last was `name`, which stands before it."""
        last = next(reversed(self.seconds))
        rest = self.seconds.pop(last) - seconds
        self.seconds |= {name: self.seconds.get(name, 0.0) + seconds, last: max(0.0, rest)}


def launchers_phases() -> dict[str, float]:
    """What the launcher has measured before it started this rank."""
    written = json.loads(os.environ.get(VARIABLE, "{}"))
    return {str(name): float(seconds) for name, seconds in written.items()}


def process_began() -> float:
    """When this process was started, by the monotonic clock."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return time.monotonic()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - max(0.0, age)


def phase_table(seconds: Mapping[str, float]) -> str:
    """A line for each phase, and one for all."""
    rows = {**seconds, "first update after": sum(seconds.values())}
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}} {value:7.2f} s" for name, value in rows.items())


@contextmanager
def collector_off(*, keep: bool = False) -> Iterator[None]:
    """Without Python's garbage collector, which takes a fifth of the time of large imports and finds next to nothing.

    With `keep` what there is in the end is never looked at again: modules and graphs stay until the process ends.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if keep:
            gc.freeze()
        if was_on:
            gc.enable()
