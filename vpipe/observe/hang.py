"""Why a run hangs, in a sentence: who waits for whom, who keeps them all waiting, and where in the schedule that is.

    rank 1 waits for 1RECV_F7 from rank 0 (for 31 s); rank 0 has been in 0F8 for 31 s

Each rank says what it is in (`vpipe.record.status`); a rank that says nothing any more has left its page
(`vpipe.record.whereabouts`) for those who share it, and the system says what became of its process.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping
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
"""Seconds without a status after which a rank's own word is not enough."""
DRAWN = 200
"""Minibatches that are walked for a drawing at most; a longer run repeats itself."""
ACTIONS = 20_000
STOPPED, GONE, SILENCE = "is stopped (by SIGSTOP or a debugger)", "is gone", "says nothing any more"


@dataclass(frozen=True)
class RankState:
    """What one rank does, and what became of it if it does nothing."""

    status: Status
    place: str
    """An action's name, or words."""
    inside: bool
    seconds: float
    fate: str = ""
    """STOPPED, GONE or SILENCE, or empty."""

    @property
    def rank(self) -> int:
        return self.status.rank

    @property
    def action(self) -> Action | None:
        return Action.parse(self.place) if PATTERN.fullmatch(self.place) else None

    @property
    def waits(self) -> bool:
        return self.status.waiting is not None and not self.fate and self.status.state == RUNNING

    def __str__(self) -> str:
        where = f"in {self.place}" if self.inside else f"behind {self.place}"
        if self.fate:
            return f"rank {self.rank} {self.fate}: it was {where}"
        if self.status.state in (ENDED, FAILED):
            why = f": {self.status.error}" if self.status.error else ""
            return f"rank {self.rank} has {self.status.state}{why}"
        if self.status.waiting is not None:
            return _waits(self.status)
        return f"rank {self.rank} has been {where} for {_seconds(self.seconds)}"


def explain(folder: Path, schedule: Schedule, page: Page | None = None) -> str:
    """The sentence, and the schedule's grid with the places marked. `page` is the launcher's, if there is one."""
    found = findings(folder, page)
    missing = sorted(set(range(schedule.num_ranks)) - {each.rank for each in found})
    said = sentence(found)
    if missing:
        said += f"; of rank {', '.join(map(str, missing))} there is no status in {folder}"
    return f"{said}\n{grid(schedule, found)}"


def findings(folder: Path, page: Page | None = None) -> list[RankState]:
    return [finding(status, page) for status in read_statuses(folder)]


def finding(status: Status, page: Page | None = None) -> RankState:
    """A rank's own word or, if that is old, what the page and the system say."""
    old = time.time() - status.time
    if status.state in (ENDED, FAILED) or old < SILENT or status.host != socket.gethostname():
        running = old if status.state == RUNNING else 0.0
        return RankState(status, status.place, status.inside, status.seconds + running)
    fate = fate_of(status.process)
    if page is None:
        return RankState(status, status.place, status.inside, status.seconds + old, fate)
    place = page.place(status.rank)
    return RankState(status, str(place), True, time.perf_counter() - place.since, fate)


def fate_of(process: int) -> str:
    """What the system says of a process that says nothing itself."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return GONE
    except OSError:
        return SILENCE
    return {"T": STOPPED, "t": STOPPED, "Z": GONE, "X": GONE}.get(state, SILENCE)


def sentence(found: list[RankState]) -> str:
    """Who waits for whom, from one that waits to the one that keeps it waiting."""
    by_rank = {each.rank: each for each in found}
    chains = [_chain(each, by_rank) for each in found if each.waits]
    if not chains:
        return "; ".join(map(str, found)) or "no rank has said anything"
    chain = max(chains, key=len)
    told = "; ".join(str(by_rank[rank]) for rank in chain)
    last = by_rank[chain[-1]]
    if last.waits and last.status.waiting is not None and last.status.waiting.peer in chain:
        told += ": they wait for each other"
    others = [each for each in found if each.rank not in chain]
    return told + "".join(f"; {each}" for each in others)


def culprit(found: list[RankState]) -> RankState | None:
    """The rank that does not wait and that others wait for; None if nobody waits, or all for each other."""
    by_rank = {each.rank: each for each in found}
    for each in found:
        if each.waits:
            last = by_rank[_chain(each, by_rank)[-1]]
            if not last.waits:
                return last
    return None


def _chain(first: RankState, by_rank: Mapping[int, RankState]) -> list[int]:
    """From a rank that waits to the one that it waits for, and so on; it ends with who does not, or comes twice."""
    chain = [first.rank]
    while True:
        waiting = by_rank[chain[-1]].status.waiting if by_rank[chain[-1]].waits else None
        if waiting is None or waiting.peer in chain or waiting.peer not in by_rank:
            return chain
        chain.append(waiting.peer)


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
    """The schedule as far as each rank has come, with what it is in behind that."""
    placed = [each for each in found if each.action is not None]
    if not placed:
        return ""
    offset = min(each.status.offset for each in placed)
    shift = _shift(schedule, placed, offset)
    ends: dict[int, int | None] = dict.fromkeys(range(schedule.num_ranks), 0)
    marks: dict[int, str] = {}
    for each in placed:
        action = each.action
        assert action is not None
        relative = action._replace(minibatch=action.minibatch - offset - shift)
        place = next((i for i, known in _program(schedule, each.rank) if known == relative), None)
        if place is not None:
            ends[each.rank] = place if each.inside else place + 1
        elif schedule.minibatches is not None:
            ends[each.rank] = None  # it is at a later update already
        what = each.fate or ("waits" if each.waits else "")
        if each.inside or what:
            marks[each.rank] = f"[{action}]" + (f" << {what}" if what else " << here")
    if not marks:
        return ""
    sound = replace(schedule, order=partial(cut, schedule.order, ends))
    events: list[Event] = []
    with suppress(Deadlock):  # it ends where the ranks stand
        for rank, action, start, end in walk(sound):
            moved = action._replace(minibatch=action.minibatch + offset + shift)
            events.append(Event(rank, moved, start, end))
            if len(events) > ACTIONS:
                break
    return draw_marked(schedule, events, marks)


def _program(schedule: Schedule, rank: int) -> Iterator[tuple[int, Action]]:
    return enumerate(islice(schedule.program(rank), ACTIONS))


def _shift(schedule: Schedule, placed: list[RankState], offset: int) -> int:
    """Whole periods that an endless schedule is drawn later than its beginning."""
    if schedule.minibatches is not None:
        return 0
    earliest = min(each.action.minibatch for each in placed if each.action is not None) - offset
    period = lcm(schedule.update_interval, *(len(ranks) for ranks in schedule.placement))
    return max(0, earliest - DRAWN) // period * period
