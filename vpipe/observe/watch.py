"""The watch of a rank: a thread that samples the memory, tells what the rank is doing, and notices a hang.

It wakes ten times a second and looks; the rank itself does nothing for it but leave notes (`whereabouts`, what its
handler waits for). When some rank has waited too long, its watch leaves a request in the run's folder; every watch then
writes its rank's stacks into the log, and the one that asked joins what all say (`vpipe.observe.hang`).
"""

from __future__ import annotations

import faulthandler
import os
import socket
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vpipe.communication.handler import ROOM
from vpipe.observe.figures import TIMES, RankFigures, figures_of
from vpipe.observe.hang import explain
from vpipe.observe.resident import gauge_for
from vpipe.record.log import RankLog
from vpipe.record.status import ENDED, FAILED, RUNNING, Status, Waiting, read_statuses, write_status
from vpipe.record.whereabouts import launchers_page
from vpipe.schedule.action import COMMUNICATION, UPDATE

if TYPE_CHECKING:
    from vpipe.pipeline import Pipeline

BEAT = 0.1
"""Seconds between two looks."""
STATUS = 10
"""Looks between two statuses."""
WINDOW = 5
"""Statuses over which `times` are counted."""
SAMPLES = 36_000
"""Of the memory; of a longer run the last hour."""
ANSWERS = 2.5
"""Seconds that the others have to tell what they are in."""
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
        """`facts` gives what only the recorder knows of a status; `say` tells the user."""
        super().__init__(name="vpipe watch", daemon=True)
        self._pipe, self._folder, self._log = pipe, folder, log
        self._limit, self._facts, self._say = limit, facts, say
        self._gauge = gauge_for(pipe.runtime)
        self.memory = MemorySamples(self._gauge.of)
        self._recent: deque[RankFigures] = deque([figures_of(pipe)], maxlen=WINDOW + 1)
        self._leave = threading.Event()
        self._answered = 0  # the request's time
        self._asked: tuple[object, float] | None = None  # what is waited for, and when the others were asked
        if pipe.rank == 0:  # an earlier attempt of this run may have ended in the middle of a hang
            (folder / REQUEST).unlink(missing_ok=True)
            (folder / EXPLAINED).unlink(missing_ok=True)
        self._told = 0  # the explanation's time, on rank 0
        self.start()

    def run(self) -> None:
        looks = 0
        while not self._leave.wait(BEAT):
            now = time.perf_counter()
            self.memory.add(now, self._gauge.read())
            if looks % STATUS == 0:
                with suppress(OSError):  # a full disk must not end the watch
                    self._look()
            looks += 1

    def close(self, error: BaseException | None = None) -> None:
        """The run is over: leave the last status behind."""
        self._leave.set()
        self.join(5.0)
        with suppress(OSError):
            self._pass_on()
            write_status(self._status(FAILED if error else ENDED, str(error or "")), self._folder)
            if self._asked is not None:
                (self._folder / REQUEST).unlink(missing_ok=True)
        self._gauge.close()

    # What the rank does

    def _look(self) -> None:
        self._recent.append(figures_of(self._pipe))
        write_status(self._status(RUNNING), self._folder)
        self._answer()
        self._notice()
        self._pass_on()

    def _status(self, state: str, error: str = "") -> Status:
        pipe, runtime = self._pipe, self._pipe.runtime
        place = self._place()
        recent = self._recent[-1].since(self._recent[0])
        return Status(
            rank=pipe.rank,
            stages=tuple(runtime.stages),
            process=os.getpid(),
            host=socket.gethostname(),
            time=time.time(),
            state=state,
            error=error,
            place=place.name,
            inside=place.inside,
            seconds=time.perf_counter() - place.since if place.since else 0.0,
            offset=runtime.offset,
            waiting=self._waiting(),
            times={name: getattr(recent, name) for name in TIMES} | {"all": recent.seconds},
            memory=self._gauge.read(),
            peak_memory=int(recent.peak_memory),
            in_flight=tuple(len(stage.in_flight) for stage in runtime.stages.values()),
            versions=tuple(stage.optimizer.num_versions for stage in runtime.stages.values()),
            **self._facts(),
        )

    def _waiting(self) -> Waiting | None:
        """What the rank waits for now, if it does."""
        now = time.perf_counter()
        gathering = self._pipe.world.gathering
        if gathering is not None:
            name, peer, since = gathering
            return Waiting(f"the meeting {name!r}", peer, now - since)
        waiting = self._pipe.handler.waiting
        if waiting is None:
            return None
        kind, name, number, peer, since = waiting
        place = self._place()
        within = place.inside and place.waits
        return Waiting(
            place.name if within else f"{name!r} number {number}", peer, now - since, room=kind == ROOM
        )

    def _place(self) -> _Place:
        """What the rank is in, or behind which action it is."""
        place = self._pipe.runtime.whereabouts.page.place(self._pipe.rank)
        last = self._pipe.runtime.events.last
        if place.action is None:
            return _Place(str(place), True, place.since, False)
        inside = last is None or last.start < place.since
        since = place.since if inside or last is None else last.end
        return _Place(str(place.action), inside, since, place.action.op in COMMUNICATION | UPDATE)

    # Hangs

    def _notice(self) -> None:
        """Ask everybody if this rank has waited too long; explain when they had time to answer."""
        told = self._pipe.world.gathering or self._pipe.handler.waiting
        waiting = self._waiting()
        if self._asked is not None:
            what, asked = self._asked
            if told is not what:
                self._asked = None
                self._log.line(f"rank {self._pipe.rank} goes on")
                (self._folder / REQUEST).unlink(missing_ok=True)
            elif asked and time.monotonic() - asked > ANSWERS:
                self._asked = (what, 0.0)  # once is enough
                text = explain(self._folder, self._pipe.layout.schedule, launchers_page())
                self._log.line(text)
                (self._folder / EXPLAINED).write_text(text + "\n", encoding="utf-8")
        elif waiting is not None and waiting.seconds > self._limit:
            with suppress(FileExistsError), (self._folder / REQUEST).open("x"):
                self._asked = (told, time.monotonic())

    def _answer(self) -> None:
        """Somebody waits for too long: leave the stacks of this rank in its log, once for each request."""
        try:
            asked = (self._folder / REQUEST).stat().st_mtime_ns
        except FileNotFoundError:
            return
        if asked != self._answered:
            self._answered = asked
            self._log.line(f"some rank waits for more than {self._limit:g} s; the stacks of this one:")
            faulthandler.dump_traceback(self._log.file)

    def _pass_on(self) -> None:
        """The first rank speaks to the user, whoever found out."""
        if self._pipe.rank:
            return
        path = self._folder / EXPLAINED
        with suppress(FileNotFoundError):
            written = path.stat().st_mtime_ns
            if written != self._told:
                self._told = written
                self._say(path.read_text(encoding="utf-8"))

    def others(self) -> list[Status]:
        """What all ranks wrote last, this one included."""
        return read_statuses(self._folder)


class _Place(NamedTuple):
    name: str
    inside: bool
    since: float
    waits: bool
    """Whether it is an action that waits for others by its nature."""


class MemorySamples:
    """Times and bytes, the last `SAMPLES` of them, of a process or a device."""

    def __init__(self, of: str) -> None:
        self.of = of
        self.times = array("d")
        self.bytes = array("q")

    def add(self, now: float, count: int) -> None:
        if len(self.times) == SAMPLES:
            del self.times[: SAMPLES // 10], self.bytes[: SAMPLES // 10]
        self.times.append(now)
        self.bytes.append(count)
