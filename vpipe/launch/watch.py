"""Who failed first, and how: from exit codes, process states and beats.

A rank that waits for another one, imports, captures a model or computes for long beats all the same; one that holds
the interpreter lock and is at work (its processor time grows, or it waits for a processor or a disk) is given
`patience` instead of `limit`. So the rank that is named is the one that stands still, not the one that waits for it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import NamedTuple

from vpipe.launch.rank import ASKED, BEAT, MISTAKE, PEER_FAILED
from vpipe.record.whereabouts import Page

IDLE = 0.05
"""Share of a processor below which a process that does not beat is not at work."""
DOUBT = 1.0
"""Seconds that a rank which only followed another one may be ahead of it."""


class Culprit(NamedTuple):
    rank: int
    how: str
    mistake: bool = False
    """A user's mistake, told in one line: it would be made again."""


@dataclass
class _Seen:
    """What a rank's process did lately."""

    stopped: float | None = None  # since when it is in state T
    idle: float | None = None  # since when it uses no processor
    ticks: int = 0  # processor time used until `at`
    at: float | None = None


class LauncherWatch:
    def __init__(
        self,
        children: Sequence[Popen[bytes]],
        page: Page,
        logs: Sequence[Path],
        stages: Sequence[str],
        *,
        limit: float,
        patience: float,
    ) -> None:
        self.children = children
        self.page = page
        self.stages = stages  # of each rank, in words
        self.limit = limit
        self.patience = patience
        self._logs = [(log, log.stat().st_size) for log in logs]  # an earlier attempt may have written there
        self._seen = [_Seen() for _ in children]
        self._follower_since: float | None = None
        self._looked = 0.0
        self._train: Callable[[], None] | None = None

    def when_all_train(self, tell: Callable[[], None]) -> None:
        """`tell` is called once, when every rank has begun an action."""
        self._train = tell

    def culprit(self) -> Culprit | None:
        """The rank that failed first, once one has."""
        codes = [child.poll() for child in self.children]
        failed = {rank: code for rank, code in enumerate(codes) if code and code != ASKED}
        own = [rank for rank, code in failed.items() if code != PEER_FAILED]
        if own:
            # A killed process says nothing; whoever says something may say it because of that one.
            rank = min(own, key=lambda rank: (failed[rank] > 0, rank))
            return Culprit(rank, self._ended(rank, failed[rank]), failed[rank] == MISTAKE)
        if failed:
            self._follower_since = self._follower_since or time.monotonic()
            if None not in codes or time.monotonic() - self._follower_since > DOUBT:
                rank = min(failed)
                return Culprit(rank, self._said(rank) or f"ended with exit code {PEER_FAILED}")
        now = time.monotonic()
        if now - self._looked < BEAT:
            return None
        self._looked = now
        if self._train and all(self.page.place(rank).action for rank in range(len(codes))):
            self._train()
            self._train = None
        return next(filter(None, (self._still(r, now) for r, code in enumerate(codes) if code is None)), None)

    def _still(self, rank: int, now: float) -> Culprit | None:
        """A rank that is stopped, or whose interpreter does not run."""
        seen, found = self._seen[rank], _look(self.children[rank].pid)
        if found is None:
            return None
        state, ticks = found
        seen.stopped = (seen.stopped or now) if state == "T" else None
        if seen.stopped is not None and now - seen.stopped > self.limit / 2:
            return Culprit(rank, self._where(rank, f"stopped (SIGSTOP) for {now - seen.stopped:.1f} s"))
        if seen.at is None:
            seen.ticks, seen.at = ticks, now
        window = now - seen.at
        if window > min(1.0, self.limit / 5):  # a tick is 10 ms: shorter windows tell nothing
            used = (ticks - seen.ticks) / os.sysconf("SC_CLK_TCK")
            # The main thread's state. Others, which wait for the lock, look for it and run for a moment all the time.
            at_work = used > IDLE * window or state in ("R", "D")
            seen.idle = None if at_work else seen.idle or seen.at
            seen.ticks, seen.at = ticks, now
        beat = self.page.beat(rank)
        silent = now - beat if beat else 0.0
        idle = now - seen.idle if seen.idle is not None else 0.0
        if silent > self.patience or (silent > 0.9 * self.limit and idle > self.limit / 2):
            how = f"stuck: its interpreter has not run for {silent:.1f} s"
            return Culprit(rank, self._where(rank, how))
        return None

    def _ended(self, rank: int, code: int) -> str:
        if code < 0:
            return self._where(rank, f"killed by {signal.Signals(-code).name}")
        said = self._said(rank)
        if code == MISTAKE and said:
            return self._message(rank)
        return self._where(rank, said or f"ended with exit code {code}")

    def _where(self, rank: int, how: str) -> str:
        place = self.page.place(rank)
        when = f"its last action was {place}" if place.action else f"during {place}"
        return f"{how} ({self.stages[rank]}, {when})"

    def _said(self, rank: int) -> str:
        """The last line of its traceback, or what it said in one line."""
        lines = self.output(rank).splitlines()
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        if errors:
            return errors[-1]
        start = max((n for n, line in enumerate(lines) if line.startswith("Traceback ")), default=len(lines))
        return next((line for line in lines[start + 1 :] if line[:1].strip()), "")

    def _message(self, rank: int) -> str:
        """The last error that it told, with all of its lines: it ended after that."""
        return f"\n{self.output(rank)}".rpartition("\nerror: ")[2].rstrip()

    def output(self, rank: int) -> str:
        """What the rank has written to its log in this attempt."""
        log, start = self._logs[rank]
        with log.open("rb") as file:
            file.seek(start)
            return file.read().decode(errors="replace")


def _look(process: int) -> tuple[str, int] | None:
    """The state of a process (of its main thread), and the processor time that it has used, in ticks."""
    try:
        told = Path("/proc", str(process), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return told[0], int(told[11]) + int(told[12])
