"""The watch of a rank: a thread that samples the memory, writes the rank's status, and detects a hang.

It wakes ten times a second and reads what the rank leaves for it (`whereabouts`, `handler.waiting`). When a rank has
waited too long, its watch leaves a request in the run's folder; every watch then writes its rank's stacks into the log,
and the one that made the request explains the hang from the statuses of all (`vpipe.observe.hang`).
"""

from __future__ import annotations

import faulthandler
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vpipe.communication.handler import ROOM
from vpipe.observe.figures import RankFigures, figures_of
from vpipe.observe.hang import explain
from vpipe.record.events import MemorySamples
from vpipe.record.run_folder import RankLog
from vpipe.record.status import (
    ENDED,
    FAILED,
    RUNNING,
    TIMES,
    Status,
    Waiting,
    replace_text,
    write_status,
)
from vpipe.record.whereabouts import RankActivity, launchers_page
from vpipe.schedule.action import COMMUNICATION, UPDATE
from vpipe.system.device_memory import used_memory

if TYPE_CHECKING:
    from vpipe.pipeline import Pipeline

BEAT = 0.1
"""Seconds between two samples."""
STATUS = 10
"""Samples between two statuses."""
WINDOW = 5
"""Statuses over which `times` are counted."""
ANSWERS = 2.5
"""Seconds that the other ranks have to write their status after a request."""
REQUEST, EXPLAINED = "hang.request", "hang.txt"


class RankWatch(threading.Thread):
    def __init__(
        self,
        pipe: Pipeline,
        folder: Path,
        log: RankLog,
        *,
        limit: float,
        facts: Callable[[], dict[str, Any]],
        say: Callable[[str], None],
    ) -> None:
        """`facts` returns the fields of a status that only the recorder knows; `say` prints for the user."""
        super().__init__(name="vpipe watch", daemon=True)
        self._pipe, self._folder, self._log = pipe, folder, log
        self._limit, self._facts, self._say = limit, facts, say
        self.memory = MemorySamples("device" if pipe.device.type == "cuda" else "process")
        self._recent: deque[RankFigures] = deque([figures_of(pipe)], maxlen=WINDOW + 1)
        self._leave = threading.Event()
        self._answered = 0  # the time of the last request that was answered
        self._requested: tuple[object, float] | None = None  # what is waited for, and the time of our request
        if pipe.rank == 0:  # an earlier attempt of this run may have ended in the middle of a hang
            (folder / REQUEST).unlink(missing_ok=True)
            (folder / EXPLAINED).unlink(missing_ok=True)
        self._shown = 0  # the time of the last explanation that rank 0 has shown
        self.start()

    def run(self) -> None:
        samples = 0
        while not self._leave.wait(BEAT):
            self.memory.add(time.perf_counter(), used_memory(self._pipe.device))
            if samples % STATUS == 0:
                with suppress(OSError):  # a full disk must not end the watch
                    self._look()
            samples += 1

    def close(self, error: BaseException | None = None) -> None:
        """The run is over: write the last status."""
        self._leave.set()
        self.join(5.0)
        with suppress(OSError):
            self._show()
            write_status(self._status(FAILED if error else ENDED, str(error or "")), self._folder)
            if self._requested is not None:
                (self._folder / REQUEST).unlink(missing_ok=True)

    # Status

    def _look(self) -> None:
        self._recent.append(figures_of(self._pipe))
        write_status(self._status(RUNNING), self._folder)
        self._answer()
        self._detect()
        self._show()

    def _status(self, state: str, error: str = "") -> Status:
        pipe, runtime = self._pipe, self._pipe.runtime
        place, inside = self._place()
        recent = self._recent[-1].since(self._recent[0])
        return Status(
            rank=pipe.rank,
            stages=tuple(runtime.stages),
            process=os.getpid(),
            host=socket.gethostname(),
            time=time.time(),
            uptime=time.monotonic(),
            state=state,
            error=error,
            place=str(place),
            inside=inside,
            seconds=time.perf_counter() - place.since if place.since else 0.0,
            offset=runtime.offset,
            waiting=self._waiting(),
            times={name: getattr(recent, name) for name in TIMES} | {"all": recent.clock},
            memory=used_memory(pipe.device),
            peak_memory=int(recent.peak_memory),
            in_flight=tuple(len(stage.in_flight) for stage in runtime.stages.values()),
            versions=tuple(stage.optimizer.num_versions for stage in runtime.stages.values()),
            **self._facts(),
        )

    def _waiting(self) -> Waiting | None:
        """The message or meeting that the rank waits for now."""
        now = time.perf_counter()
        gathering = self._pipe.world.gathering
        if gathering is not None:
            name, peer, since = gathering
            return Waiting(f"the meeting {name!r}", peer, now - since)
        waiting = self._pipe.handler.waiting
        if waiting is None:
            return None
        kind, name, number, peer, since = waiting
        place, inside = self._place()
        waits = inside and place.action is not None and place.action.op in COMMUNICATION | UPDATE
        what = str(place) if waits else f"{name!r} number {number}"
        return Waiting(what, peer, now - since, room=kind == ROOM)

    def _place(self) -> tuple[RankActivity, bool]:
        """The action that the rank runs, since it began, or the last one, since it ended; and whether it still runs."""
        place = self._pipe.runtime.whereabouts.page.place(self._pipe.rank)
        last = self._pipe.runtime.events.last
        if place.action is None or last is None or last.start < place.since:
            return place, True
        return place._replace(since=last.end), False

    # Hangs

    def _detect(self) -> None:
        """Make a request if this rank has waited too long; explain when the others had time to answer."""
        awaited = self._pipe.world.gathering or self._pipe.handler.waiting
        waiting = self._waiting()
        if self._requested is not None:
            what, requested = self._requested
            if awaited is not what:
                self._requested = None
                self._log.line(f"rank {self._pipe.rank} goes on")
                (self._folder / REQUEST).unlink(missing_ok=True)
            elif requested and time.monotonic() - requested > ANSWERS:
                self._requested = (what, 0.0)  # explain once
                text = explain(self._folder, self._pipe.layout.schedule, launchers_page())
                self._log.line(text)
                replace_text(self._folder / EXPLAINED, text + "\n")
        elif waiting is not None and waiting.seconds > self._limit:
            with suppress(FileExistsError), (self._folder / REQUEST).open("x"):
                self._requested = (awaited, time.monotonic())

    def _answer(self) -> None:
        """Write the stacks of this rank into its log, once for each request."""
        try:
            requested = (self._folder / REQUEST).stat().st_mtime_ns
        except FileNotFoundError:
            return
        if requested != self._answered:
            self._answered = requested
            self._log.line(f"some rank waits for more than {self._limit:g} s; the stacks of this one:")
            faulthandler.dump_traceback(self._log.file)

    def _show(self) -> None:
        """Rank 0 shows the explanation to the user, whichever rank wrote it."""
        if self._pipe.rank:
            return
        path = self._folder / EXPLAINED
        with suppress(FileNotFoundError):
            written = path.stat().st_mtime_ns
            if written != self._shown:
                self._shown = written
                self._say(path.read_text(encoding="utf-8"))
