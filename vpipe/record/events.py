"""The ring of a rank's recorded actions, and `events.<rank>.json`, the file that it is written to.

The ring is always on. Recording an action is one `pack_into` of 52 bytes; in a full ring it overwrites the oldest one.
Times are those of `time.perf_counter`; in the file they are rank 0's (`vpipe.runtime.clocks`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple

from vpipe.errors import ConfigError
from vpipe.schedule import Action, Op
from vpipe.system.files import read_json, write_json

CAPACITY = 1 << 16
"""Actions that a ring holds: some 3 MB, of which the system provides only the pages that are written to."""
SAMPLES = 36_000
"""Of the memory; of a longer run the last hour."""
MEMORY = 4000
"""The most samples of the memory in a file."""
FORMAT = "vpipe events 1"
NO_VERSION = -1
"""The weight version of an action that reads and makes none."""
COLUMNS = ("actions", "start", "duration", "wait", "sent", "received", "version", "evaluation")
"""The lists of a file, one entry an action. Times are whole nanoseconds, starts counted from `origin`."""

_RECORD = Struct("=dddqqiiHB?")
_OPS = tuple(Op)
_CODES = {op: code for code, op in enumerate(_OPS)}


class ClockOffset(NamedTuple):
    """`seconds` are added to this rank's clock to get rank 0's; the error is at most half of `round_trip`."""

    seconds: float
    round_trip: float


SAME_CLOCK = ClockOffset(0.0, 0.0)


class Recorded(NamedTuple):
    """One action as it ran: seconds, bytes, and the version that F, I and B read and STEP made."""

    action: Action
    start: float
    end: float
    wait: float = 0.0
    sent: int = 0
    received: int = 0
    version: int = NO_VERSION
    evaluation: bool = False

    @property
    def duration(self) -> float:
        return self.end - self.start


class StageBytes(NamedTuple):
    """Bytes of a stage: one version of its weights, the optimizer's state, one minibatch in flight."""

    weights: int
    optimizer: int
    minibatch: int


class MemorySamples:
    """Times and bytes of a process or a device, the last `SAMPLES` of them."""

    def __init__(self, of: str) -> None:
        self.of = of
        self.times = array("d")
        self.bytes = array("q")

    def add(self, now: float, count: int) -> None:
        if len(self.times) == SAMPLES:
            del self.times[: SAMPLES // 10], self.bytes[: SAMPLES // 10]
        self.times.append(now)
        self.bytes.append(count)


@dataclass(frozen=True)
class RankEvents:
    """The contents of one rank's file, the oldest action first, in the time of rank 0."""

    rank: int
    actions: tuple[Recorded, ...]
    lost: int = 0
    """Older actions that were overwritten in the ring."""
    clock: ClockOffset = SAME_CLOCK
    edges: tuple[tuple[int, int], ...] = ()
    """Stages that make a value and stages that read it: (producer, reader)."""
    held: Mapping[int, StageBytes] = field(default_factory=dict)
    """By stage; empty if nothing was counted."""
    memory: tuple[tuple[float, int], ...] = ()
    """Times and bytes: of the whole process, libraries included, or of the process' use of its GPU."""
    memory_of: str = "process"


class Events:
    """The ring of one rank. `clock` is the result of `align_clocks`; `edges` go between the model's stages."""

    def __init__(self, rank: int, edges: Iterable[tuple[int, int]] = (), *, capacity: int = CAPACITY) -> None:
        self.rank = rank
        self.edges = sorted(set(edges))
        self.capacity = capacity
        self.count = 0
        self.clock = SAME_CLOCK
        self._ring = bytearray(capacity * _RECORD.size)

    def add(
        self,
        action: Action,
        start: float,
        end: float,
        wait: float,
        sent: int,
        received: int,
        version: int,
        evaluation: bool,
    ) -> None:
        stage, op, minibatch = action
        place = self.count % self.capacity * _RECORD.size
        values = (start, end, wait, sent, received, minibatch, version, stage, _CODES[op], evaluation)
        _RECORD.pack_into(self._ring, place, *values)
        self.count += 1

    @property
    def lost(self) -> int:
        return max(0, self.count - self.capacity)

    @property
    def last(self) -> Recorded | None:
        """The newest action, in this rank's own time."""
        return self._at(self.count - 1) if self.count else None

    def actions(self) -> list[Recorded]:
        """All actions in the ring, the oldest first, in this rank's own time."""
        return [self._at(number) for number in range(self.lost, self.count)]

    def _at(self, number: int) -> Recorded:
        start, end, wait, sent, received, minibatch, version, stage, code, evaluation = _RECORD.unpack_from(
            self._ring, number % self.capacity * _RECORD.size
        )
        action = Action(stage, _OPS[code], minibatch)
        return Recorded(action, start, end, wait, sent, received, version, evaluation)

    def write(
        self, folder: Path, held: Mapping[int, StageBytes] | None = None, memory: MemorySamples | None = None
    ) -> Path:
        """Write `events.<rank>.json` into a run's folder."""
        path = folder / f"events.{self.rank}.json"
        actions = self.actions()
        origin = min((a.start for a in actions), default=0.0)
        rows = [_row(entry, origin) for entry in actions]
        head = {
            "format": FORMAT,
            "rank": self.rank,
            "lost": self.lost,
            "origin": origin + self.clock.seconds,
            "clock_offset": self.clock.seconds,
            "round_trip": self.clock.round_trip,
            "edges": self.edges,
            "held": [[stage, *counts] for stage, counts in (held or {}).items()],
            "memory_of": "process" if memory is None else memory.of,
            "memory": [] if memory is None else _thinned(memory, origin),
        }
        write_json(path, head | {key: [row[n] for row in rows] for n, key in enumerate(COLUMNS)})
        return path


def _row(entry: Recorded, origin: float) -> tuple[Any, ...]:
    times = (entry.start - origin, entry.duration, entry.wait)
    nanoseconds = (round(1e9 * seconds) for seconds in times)
    return (str(entry.action), *nanoseconds, entry.sent, entry.received, entry.version, int(entry.evaluation))


def _thinned(memory: MemorySamples, origin: float) -> list[list[int]]:
    """[nanoseconds from `origin`, bytes]: at most `MEMORY` samples, each the largest of its neighbours."""
    count = len(memory.bytes)
    step = max(1, -(-count // MEMORY))
    return [
        [round(1e9 * (memory.times[place] - origin)), max(memory.bytes[place : place + step])]
        for place in range(0, count, step)
    ]


def read_events(folder: Path) -> list[RankEvents]:
    """The events of a run's ranks, in order of rank; none if it wrote none."""
    found = [_read(path) for path in folder.glob("events.*.json")]
    return sorted(found, key=lambda events: events.rank)


def _read(path: Path) -> RankEvents:
    values = read_json(path)
    try:
        if values["format"] != FORMAT:
            raise ValueError(f"its format is {values['format']!r}")
        origin = float(values["origin"])
        rows = zip(*(values[key] for key in COLUMNS), strict=True)
        return RankEvents(
            int(values["rank"]),
            tuple(_recorded(origin, *row) for row in rows),
            int(values["lost"]),
            ClockOffset(float(values["clock_offset"]), float(values["round_trip"])),
            tuple((int(producer), int(reader)) for producer, reader in values["edges"]),
            {int(stage): StageBytes(*map(int, counts)) for stage, *counts in values.get("held", ())},
            tuple((origin + time / 1e9, int(count)) for time, count in values.get("memory", ())),
            str(values.get("memory_of", "process")),
        )
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path}: is not a file of events ({FORMAT}): {type(error).__name__}: {error}; remove it to do without"
        ) from None


def _recorded(origin: float, name: str, start: int, duration: int, wait: int, *rest: int) -> Recorded:
    times = (origin + start / 1e9, origin + (start + duration) / 1e9, wait / 1e9)
    sent, received, version, evaluation = map(int, rest)
    return Recorded(Action.parse(name), *times, sent, received, version, bool(evaluation))
