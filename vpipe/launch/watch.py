"""The rank that failed first, and how: found from exit codes, process states and heartbeats.

A rank that waits for another one, imports, captures a model or computes for long sends heartbeats all the same; one
that holds the interpreter lock and is at work (its processor time grows, or it waits for a processor or a disk) is
given `patience` instead of `limit`. So the rank that is named is the one that stands still, not one that waits for it.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from vpipe.errors import NotWrittenError, RankFailedError, VPipeError
from vpipe.launch.helpers import state_of
from vpipe.launch.rank import ASKED, INTERVAL, PEER_FAILED
from vpipe.record.run_folder import log_path
from vpipe.record.whereabouts import Page
from vpipe.system.best_effort import BestEffort, LogFile
from vpipe.system.files import json_text, read_tail
from vpipe.system.start import Phases

IDLE = 0.05
"""Share of a processor below which a thread is not at work. One that waits for the interpreter lock looks for it 200
times a second: that takes 1 % as the kernel counts it, of any number of threads."""
TICKS = os.sysconf("SC_CLK_TCK")
"""Of a second, as the kernel counts processor time."""
PAUSE = 1.0
"""Seconds between two looks at the ranks, and more: the launcher was stopped, or the machine suspended."""
KINDS = {kind.exit_code: kind for kind in (VPipeError, NotWrittenError)}
"""Errors that a rank has reported in words for the user, by its exit code."""
SAME = 200
"""Bytes at the end of an error by which it is found in a log."""
FOLLOWER_WAIT = 1.0
"""Seconds after which a rank that blames another one is named itself, if no other has failed."""
_BLAMED = re.compile(r"stopped because rank (\d+) failed: (.*)")
"""The last error of a rank that knows by its heartbeats which rank failed: one of a host that may be cut off."""


class Child(Protocol):
    """A process of ours, as `subprocess.Popen` has it."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self) -> int | None: ...

    def send_signal(self, sig: int, /) -> None: ...

    def kill(self) -> None: ...


@dataclass(frozen=True)
class Ranks:
    """What to start, and how to watch it."""

    arguments: Sequence[str]
    count: int
    folder: Path
    stages: Sequence[str]
    """The stages of each rank, as text for messages."""
    port: int = 0
    directory: Path | None = None
    interpreter: Sequence[str] = (sys.executable,)
    quiet: bool = False
    heartbeat_limit: float = 10.0
    patience: float = 600.0
    gpus: Sequence[int] | None = None
    """The number of the GPU of each rank of this host; None: they compute on the CPU, or find a GPU themselves."""
    phases: Phases | None = None
    """What has gone before, for the ranks' own account of their start."""
    prepare: Callable[[Phases], object] | None = None
    """Does once, in this process, what each rank would do first: the ranks are forked then. None: each is a new
    interpreter."""
    own: Sequence[int] | None = None
    """The ranks of this host; None: all of them."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of their environment, besides those that every rank has."""

    @property
    def here(self) -> Sequence[int]:
        return range(self.count) if self.own is None else self.own

    def log(self, rank: int) -> Path:
        return log_path(self.folder, rank)


class FailedRank(NamedTuple):
    rank: int
    how: str
    kind: type[VPipeError] = RankFailedError
    """Any other kind of error would be made again."""


class FailureLog:
    """`failures.jsonl` in the folder of a run, one line for each rank that failed.

    Times are seconds since 1970 by the clock as it was when the launcher started, whatever it is set to since.
    """

    def __init__(self, folder: Path) -> None:
        self.effort = BestEffort()  # for all that the launcher writes
        self._file = LogFile(folder / "failures.jsonl", self.effort)
        self._began = time.time() - time.monotonic()
        self._failed: float | None = None

    def now(self) -> float:
        return round(self._began + time.monotonic(), 3)

    def failed(self, attempt: int, failed: FailedRank, found: float) -> None:
        """A rank failed, and all others have ended since."""
        self._failed = found
        self._write(attempt=attempt, rank=failed.rank, how=failed.how, found=found, ended=self.now())

    def recovered(self, attempt: int) -> None:
        if self._failed is not None:
            seconds = self.now() - self._failed
            print(f"the run trains again, {seconds:.1f} s after the fault", file=sys.stderr, flush=True)
            self._write(attempt=attempt, recovered=self.now())

    def _write(self, **figures: object) -> None:
        self._file.line(json_text(figures))


@dataclass
class _Seen:
    """What a rank's process did lately."""

    stopped: float | None = None  # since when it is in state T
    idle: float | None = None  # since when none of its threads is at work
    ticks: Mapping[str, int] = field(default_factory=dict)  # processor time of each thread until `at`
    at: float | None = None  # None: it sends heartbeats


class LauncherWatch:
    def __init__(
        self,
        children: Mapping[int, Child],
        page: Page,
        ranks: Ranks,
        on_training: Callable[[], None] | None = None,
    ) -> None:
        """`children` are the ranks of this host; `on_training` is called once, when each has begun an action."""
        self.children = children
        self.page = page
        self.ranks = ranks
        self._on_training = on_training
        # An earlier attempt may have written to the logs.
        self._logged = {rank: _size(ranks.log(rank)) for rank in children}
        self._seen = {rank: _Seen() for rank in children}
        self._follower_since: float | None = None
        self._looked = self._resumed = 0.0

    def failed_rank(self) -> FailedRank | None:
        """The rank that failed first, once one has."""
        codes = {rank: child.poll() for rank, child in self.children.items()}
        if self._on_training and all(map(self.page.has_begun, codes)):
            self._on_training()
            self._on_training = None
        failed = {rank: code for rank, code in codes.items() if code and code != ASKED}
        own = [rank for rank, code in failed.items() if code != PEER_FAILED]
        if own:
            # A killed process reports nothing; whoever reports an error may do so because of that one.
            rank = min(own, key=lambda rank: (failed[rank] > 0, rank))
            return FailedRank(rank, self._ended(rank, failed[rank]), KINDS.get(failed[rank], RankFailedError))
        if failed:
            self._follower_since = self._follower_since or time.monotonic()
            if None not in codes.values() or time.monotonic() - self._follower_since > FOLLOWER_WAIT:
                rank = min(failed)
                error = self._last_error(rank).partition("\n")[0]
                if named := _BLAMED.match(error):
                    return FailedRank(int(named[1]), named[2])
                return FailedRank(rank, error or f"ended with exit code {PEER_FAILED}")
        now = time.monotonic()
        if now - self._looked < INTERVAL:
            return None
        if now - self._looked > max(PAUSE, self.ranks.heartbeat_limit / 4):
            # The launcher itself was stopped, and the ranks perhaps with it: what they missed is not theirs.
            self._resumed = now
            self._seen = {rank: _Seen() for rank in self.children}
        self._looked = now
        return next(filter(None, (self._still(r, now) for r, code in codes.items() if code is None)), None)

    def _still(self, rank: int, now: float) -> FailedRank | None:
        """A rank that is stopped, or whose interpreter does not run."""
        seen, process = self._seen[rank], self.children[rank].pid
        state = state_of(process)
        limit = self.ranks.heartbeat_limit
        seen.stopped = (seen.stopped or now) if state == "T" else None
        if seen.stopped is not None and now - seen.stopped > limit / 2:
            return FailedRank(rank, self._where(rank, f"stopped (SIGSTOP) for {now - seen.stopped:.1f} s"))
        beat = self.page.beat(rank)
        silent = now - max(beat, self._resumed) if beat else 0.0
        window = min(1.0, limit / 5)  # a tick is 10 ms: shorter windows show nothing
        if silent < window:
            seen.at = seen.idle = None
            return None
        if seen.at is None or now - seen.at > window:
            ticks = _ticks(process)
            if seen.at is not None:
                used = max((count - seen.ticks.get(thread, 0) for thread, count in ticks.items()), default=0)
                # The main thread's state: others that wait for the lock look for it, and run for a moment.
                at_work = used > IDLE * (now - seen.at) * TICKS or state in ("R", "D")
                seen.idle = None if at_work else seen.idle or seen.at
            seen.ticks, seen.at = ticks, now
        idle = now - seen.idle if seen.idle is not None else 0.0
        if silent > self.ranks.patience or (silent > 0.9 * limit and idle > limit / 2):
            how = f"stuck: its interpreter has not run for {silent:.1f} s"
            return FailedRank(rank, self._where(rank, how))
        return None

    def _ended(self, rank: int, code: int) -> str:
        if code < 0:
            return self._where(rank, f"killed by {signal.Signals(-code).name}")
        error = self._last_error(rank)
        if code in KINDS and error:
            return error
        return self._where(rank, error.partition("\n")[0] or f"ended with exit code {code}")

    def _where(self, rank: int, how: str) -> str:
        place = self.page.place(rank)
        when = f"its last action was {place}" if place.action else f"during {place}"
        return f"{how} ({self.ranks.stages[rank]}, {when})"

    def _last_error(self, rank: int) -> str:
        """The error that it reported, with all of its lines (it ended then), or the last line of its traceback."""
        output = "\n" + self.output(rank)
        _, reported, error = output.rpartition("\nerror: ")
        if reported:
            return error.rstrip()
        _, failed, trace = output.rpartition("\nTraceback ")
        lines = trace.splitlines()[1:] if failed else []
        return next((line for line in lines if line[:1].strip()), "")

    def output(self, rank: int) -> str:
        """The end of what the rank has written to its log in this attempt, with its error, which may not be there."""
        log, error = read_tail(self.ranks.log(rank), self._logged[rank]), self.page.error(rank)
        return log if error[-SAME:] in log else f"{log}\n{error}"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _ticks(process: int) -> dict[str, int]:
    """The processor time that each of its threads has used."""
    used = {}
    for thread in Path("/proc", str(process), "task").glob("*"):
        with suppress(OSError):  # it has ended
            fields = (thread / "stat").read_text().rpartition(")")[2].split()
            used[thread.name] = int(fields[11]) + int(fields[12])
    return used
