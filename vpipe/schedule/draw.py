"""The drawing: a schedule as a grid of text, time across, one row a rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise, takewhile

from vpipe.schedule.action import COMPUTE, Op
from vpipe.schedule.lowering import as_run
from vpipe.schedule.program import Schedule
from vpipe.schedule.walk import Event, walk

IDLE, STRETCH, UPDATE_MARK = "·", "─", "*"
COLUMNS = 240
UNITS_BEFORE, UNITS_AFTER = 30, 15
TICK = 5
"""Units between two times that are written above the grid."""


def draw(schedule: Schedule, *, width: int = 120, columns: int = COLUMNS) -> str:
    """The grid at F = I = W = 1 and B = 2, in strips of `width` characters, at most `columns` units long."""
    rows = Rows(schedule, takewhile(lambda event: event.start < columns, walk(as_run(schedule))))
    per_strip = max(1, (width - rows.margin) // rows.cell)
    strips = [rows.strip(start, stop) for start, stop in pairwise(rows.cuts(per_strip))]
    legend = "F forward  B backward  I input gradient  W weight gradient"
    return "\n\n".join(map("\n".join, strips)) + f"\n\n{legend}  {UPDATE_MARK} update  {IDLE} idle"


def draw_marked(schedule: Schedule, events: Iterable[Event], marks: Mapping[int, str]) -> str:
    """The grid of events that stopped, with a mark behind what each of some ranks has done."""
    rows = Rows(schedule, events, marks)
    place = min(rows.end(rank) for rank in marks)
    return "\n".join(rows.strip(max(0, place - UNITS_BEFORE), place + UNITS_AFTER))


class Rows:
    """The labels of all units of all ranks."""

    def __init__(
        self, schedule: Schedule, events: Iterable[Event], marks: Mapping[int, str] | None = None
    ) -> None:
        self.num_ranks = schedule.num_ranks
        self.marks = marks or {}
        self.short = all(len(schedule.stages_of(rank)) == 1 for rank in range(self.num_ranks))
        self.units: list[dict[int, str]] = [{} for _ in range(self.num_ranks)]
        self.updates: list[set[int]] = [set() for _ in range(self.num_ranks)]
        for event in events:
            self.enter(event)
        self.length = max(map(self.end, range(self.num_ranks)))
        self.cell = 1 + max((len(text) for units in self.units for text in units.values()), default=1)
        self.margin = len(f"rank {self.num_ranks - 1}  ")

    def enter(self, event: Event) -> None:
        rank, action, start, end = event
        if action.op in COMPUTE:
            self.units[rank][int(start)] = (
                f"{action.op.value}{action.minibatch}" if self.short else str(action)
            )
            for unit in range(int(start) + 1, int(end)):
                self.units[rank][unit] = ""
        elif action.op is Op.STEP:
            self.updates[rank].add(int(end) - 1)

    def end(self, rank: int) -> int:
        return 1 + max(self.units[rank], default=-1)

    def cuts(self, most: int) -> list[int]:
        """Where strips of at most so many units begin and end: between actions if that is near, or at a round time."""
        cuts = [0]
        while cuts[-1] < self.length:
            start, latest = cuts[-1], min(cuts[-1] + most, self.length)
            near = range(latest, start + max(1, most * 2 // 3) - 1, -1)
            whole = (time for time in near if all(units.get(time) != "" for units in self.units))
            round_ = latest - latest % TICK if latest < self.length else latest
            cuts.append(next(whole, round_ if round_ > start else latest))
        return cuts

    def strip(self, start: int, stop: int) -> Iterator[str]:
        stop = min(stop, self.length)
        first = -(-start // TICK) * TICK
        before = " " * (first - start) * self.cell
        ticks = "".join(str(unit).ljust(TICK * self.cell) for unit in range(first, stop, TICK))
        yield ("time".ljust(self.margin) + before + ticks).rstrip()
        for rank in range(self.num_ranks):
            shown = min(stop, self.end(rank)) if rank in self.marks else stop
            cells = "".join(self.unit(rank, unit) for unit in range(start, shown))
            yield (f"rank {rank}".ljust(self.margin) + cells + self.marks.get(rank, "")).rstrip()

    def unit(self, rank: int, unit: int) -> str:
        units = self.units[rank]
        text = units.get(unit, IDLE)
        follows = units.get(unit + 1) == ""
        fill = STRETCH if follows or text == "" else " "
        end = STRETCH if follows else UPDATE_MARK if unit in self.updates[rank] else " "
        return text.ljust(self.cell - 1, fill) + end
