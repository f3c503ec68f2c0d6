"""The explanation of a hang: which rank waits for which, which one does not wait, and their places in the schedule.

    rank 1 waits for 1RECV_F7 from rank 0 (for 31 s); rank 0 has been in 0F8 for 31 s

Each rank writes its status (`vpipe.record.status`). Of a rank that has stopped writing, the shared page
(`vpipe.record.whereabouts`) holds the last action, and the system knows the state of its process.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from math import lcm
from pathlib import Path

from vpipe.record.status import ENDED, FAILED, RUNNING, Status, read_statuses
from vpipe.record.whereabouts import Page
from vpipe.schedule import Action, Event, Schedule, walk
from vpipe.schedule.action import PATTERN
from vpipe.schedule.check import cut
from vpipe.schedule.draw import draw_marked
from vpipe.schedule.walk import Deadlock

SILENT = 3.0
"""Seconds without a status after which the page and the process are checked."""
DRAWN = 200
"""The most minibatches that a drawing shows; a longer schedule repeats itself."""
ACTIONS = 20_000
STOPPED, GONE, SILENCE = "is stopped (by SIGSTOP or a debugger)", "is gone", "does not respond any more"


@dataclass(frozen=True)
class RankState:
    """What one rank does, or why it does nothing."""

    status: Status
    """As of now, not of when the rank wrote it."""
    fate: str = ""
    """STOPPED, GONE or SILENCE, or empty."""

    @property
    def rank(self) -> int:
        return self.status.rank

    @property
    def action(self) -> Action | None:
        place = self.status.place
        return Action.parse(place) if PATTERN.fullmatch(place) else None

    @property
    def where(self) -> str:
        return f"{'in' if self.status.inside else 'behind'} {self.status.place}"

    @property
    def awaited(self) -> int | None:
        """The rank that it waits for, negative if for several; None if it does not wait."""
        waiting = self.status.waiting
        return waiting.peer if waiting and not self.fate and self.status.state == RUNNING else None

    def __str__(self) -> str:
        if self.fate:
            return f"rank {self.rank} {self.fate}: it was {self.where}"
        if self.status.state in (ENDED, FAILED):
            why = f": {self.status.error}" if self.status.error else ""
            return f"rank {self.rank} has {self.status.state}{why}"
        if self.status.waiting is not None:
            return _waits(self.status)
        return f"rank {self.rank} has been {self.where} for {_seconds(self.status.seconds)}"


def explain(folder: Path, schedule: Schedule, page: Page | None = None) -> str:
    """The sentence, and the schedule's grid with the places marked. `page` is the launcher's, if there is one."""
    found = rank_states(folder, page)
    missing = sorted(set(range(schedule.num_ranks)) - {each.rank for each in found})
    text = sentence(found)
    if missing:
        text += f"; of rank {', '.join(map(str, missing))} there is no status in {folder}"
    return f"{text}\n{grid(schedule, found)}"


def rank_states(folder: Path, page: Page | None = None) -> list[RankState]:
    return [_state(status, page) for status in read_statuses(folder)]


def _state(status: Status, page: Page | None = None) -> RankState:
    """From a rank's own status or, if that is old, from the page and the system."""
    if status.state in (ENDED, FAILED):
        return RankState(status)
    here = status.host == socket.gethostname()
    # A status from before the host was started again is later than the clock is now.
    counts = here and 0 < status.uptime <= time.monotonic()
    old = time.monotonic() - status.uptime if counts else time.time() - status.time
    now = replace(status, seconds=status.seconds + old)
    if old < SILENT or not here:
        return RankState(now)
    if page is not None:
        place = page.place(status.rank)
        now = replace(status, place=str(place), inside=True, seconds=time.perf_counter() - place.since)
    return RankState(now, fate_of(status.process))


def fate_of(process: int) -> str:
    """The state of a process that has stopped writing its status."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return GONE
    except OSError:
        return SILENCE
    return {"T": STOPPED, "t": STOPPED, "Z": GONE, "X": GONE}.get(state, SILENCE)


def sentence(found: list[RankState]) -> str:
    """The longest chain from a rank that waits to the one that it waits for in the end; then the other ranks."""
    chains = _chains(found)
    if not chains:
        return "; ".join(map(str, found)) or "no rank has written a status"
    chain = max(chains, key=len)
    text = "; ".join(map(str, chain))
    if chain[-1].awaited in [each.rank for each in chain]:
        text += ": they wait for each other"
    return text + "".join(f"; {each}" for each in found if each not in chain)


def culprit(found: list[RankState]) -> RankState | None:
    """The rank that does not wait and that others wait for; None if no rank waits, or all for each other."""
    return next((chain[-1] for chain in _chains(found) if chain[-1].awaited is None), None)


def _chains(found: list[RankState]) -> list[list[RankState]]:
    """From each rank that waits to the one that it waits for, and so on, until one does not wait or comes twice."""
    by_rank: dict[int | None, RankState] = {each.rank: each for each in found}
    chains = [[each] for each in found if each.awaited is not None]
    for chain in chains:
        while (peer := by_rank.get(chain[-1].awaited)) is not None and peer not in chain:
            chain.append(peer)
    return chains


def _waits(status: Status) -> str:
    waiting = status.waiting
    assert waiting is not None
    whom = "the others" if waiting.peer < 0 else f"rank {waiting.peer}"
    how_long = _seconds(waiting.seconds)
    if waiting.room:
        return f"rank {status.rank} waits in {waiting.what} for {whom} to take what was sent (for {how_long})"
    if waiting.what.startswith("the meeting"):
        return f"rank {status.rank} waits at {waiting.what} for {whom} (for {how_long})"
    return f"rank {status.rank} waits for {waiting.what} from {whom} (for {how_long})"


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


# The grid


def grid(schedule: Schedule, found: list[RankState]) -> str:
    """The schedule up to the current action of each rank, with that action marked."""
    placed = [(each, action) for each in found if (action := each.action) is not None]
    if not placed:
        return ""
    first = min(each.status.offset for each, _ in placed)  # the minibatch that the drawing begins with
    if schedule.minibatches is None:  # endless: the drawing begins some whole periods later
        period = lcm(schedule.update_interval, *map(len, schedule.placement))
        earliest = min(action.minibatch for _, action in placed)
        first += max(0, earliest - first - DRAWN) // period * period
    ends: dict[int, int | None] = dict.fromkeys(range(schedule.num_ranks), 0)
    marks: dict[int, str] = {}
    for each, action in placed:
        relative = action._replace(minibatch=action.minibatch - first)
        program = enumerate(islice(schedule.program(each.rank), ACTIONS))
        place = next((place for place, known in program if known == relative), None)
        if place is not None:
            ends[each.rank] = place if each.status.inside else place + 1
        elif schedule.minibatches is not None:
            ends[each.rank] = None  # it is at a later update already
        what = each.fate or ("waits" if each.awaited is not None else "")
        if each.status.inside or what:
            marks[each.rank] = f"[{action}] << {what or 'here'}"
    if not marks:
        return ""
    sound = replace(schedule, order=partial(cut, schedule.order, ends))
    events: list[Event] = []
    with suppress(Deadlock):  # the walk ends at the ranks' places
        for rank, action, start, end in islice(walk(sound), ACTIONS):
            moved = action._replace(minibatch=action.minibatch + first)
            events.append(Event(rank, moved, start, end))
    return draw_marked(schedule, events, marks)
