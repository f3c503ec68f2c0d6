"""Many ranks at once: in each wave every rank that can run its next action does, as columns of numbers.

    wave     0    1    2    3    4    5
    rank 0   F0   F1   F2   .    .    B0
    rank 1        F0   F1   .    B0   F2
    rank 2             F0   B0   F1   B1

Times do not depend on the order in which ranks are looked at: a rank runs its program in order, a line carries
messages in the order in which its sender made them, and all else is a maximum and a sum. So the times are those of
`walk`, to the bit, and a wave of a thousand ranks costs about as much as a few dozen of its actions. What depends on
the clock itself, as host links do, is left to `walk`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vpipe.schedule import Op, Schedule
from vpipe.schedule.dependencies import DependencyTables
from vpipe.simulate.network import Network
from vpipe.simulate.slots import Short, Slots

Floats = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]


class Waves(NamedTuple):
    """The programs of all ranks, one behind the other, each with its end; and when each action started."""

    slots: Slots
    slot: Short
    minibatch: Short
    starts: Floats
    bounds: Numbers
    """Where each rank's program begins, and where the last one ends."""
    ends: Floats
    """When each rank was done."""
    copying: list[float]
    """How long each rank has copied messages itself."""

    def program(self, rank: int) -> tuple[Short, Short, Floats]:
        """A rank's slots, minibatches and starts, without the end."""
        own = slice(int(self.bounds[rank]), int(self.bounds[rank + 1]) - 1)
        return self.slot[own], self.minibatch[own], self.starts[own]


def run_waves(
    schedule: Schedule, network: Network, seconds: Sequence[Mapping[Op, float]], slots: Slots
) -> Waves | None:
    """The whole run; None where a rank comes to a halt, which `walk` explains."""
    programs = [slots.program(schedule, rank) for rank in range(schedule.num_ranks)]
    bounds = np.cumsum([0, *(len(own) for own, _ in programs)])
    slot, minibatch = (np.concatenate(column) for column in zip(*programs, strict=True))
    del programs
    run = _WaveRun(schedule, network, seconds, slots)
    starts = run.run(slot, minibatch, bounds[:-1])
    if not np.array_equal(run.place + 1, bounds[1:]):
        return None
    return Waves(slots, slot, minibatch, starts, bounds, run.free, run.copying.tolist())


class _WaveRun:
    """What each slot costs, needs and makes; and how far the run has come.

    `done` is when the first end of each tie is at its reader, by tie and minibatch; endless until it is known. Behind
    the ties each reduced stage has a row, filled when the last of its ranks has reduced. Of the last three rows one is
    always there, one never, and into one goes what nobody reads.
    """

    def __init__(
        self, schedule: Schedule, network: Network, seconds: Sequence[Mapping[Op, float]], slots: Slots
    ) -> None:
        total = self.total = schedule.minibatches or 0
        ties = DependencyTables(schedule, network.rules)
        reduced = sorted(schedule.reduced)
        always, never, unread = (len(ties) + len(reduced) + more for more in range(3))
        self.done = np.full((unread + 1) * total, inf)
        self.done[always * total : never * total] = 0.0
        # By reduced stage and minibatch: the ranks that have not reduced, and when the last one had.
        self.missing = np.repeat([len(schedule.placement[stage]) for stage in reduced], total)
        self.joined = np.zeros(len(reduced) * total)
        self.first_joined = len(ties) * total
        numbers = {line: number for number, line in enumerate(network.lines.values())}
        self.no_line = len(numbers)
        self.lines = np.full(len(numbers) + 1, -inf)

        self.cost, self.copied = np.zeros(slots.end + 1), np.zeros(slots.end + 1)
        self.joins = np.full(slots.end + 1, -1)
        needs: list[list[int]] = [[] for _ in range(slots.end)]
        makes: list[list[tuple[int, int, float]]] = [[] for _ in range(slots.end + 1)]
        for slot, stage, phase, op in slots:
            tied = ties.phases[phase % network.rules.period][stage][op]
            needs[slot] += tied.needs
            makes[slot] += [(tie, self.no_line, 0.0) for tie in tied.makes]
            for tie, reader in tied.sends:
                line, carried, busy = network.route(stage, reader, phase)
                makes[slot].append((tie, self.no_line, 0.0) if busy else (tie, numbers[line], carried))
                self.copied[slot] += carried if busy else 0.0
            self.cost[slot] = seconds[stage][op] + self.copied[slot]
            if stage in schedule.reduced and op is Op.STEP:
                needs[slot].append(len(ties) + reduced.index(stage))
            elif stage in schedule.reduced and op is Op.REDUCE:
                self.joins[slot] = reduced.index(stage)
        needs.append([never])
        self.needs = _rows(needs, always) * total
        width = max(map(len, makes))
        padded = [[*row, *[(unread, self.no_line, 0.0)] * (width - len(row))] for row in makes]
        self.makes = [
            (np.array([row[place][0] for row in padded]) * total,
             np.array([row[place][1] for row in padded]),
             np.array([row[place][2] for row in padded]))
            for place in range(width)
        ]  # fmt: skip

    def run(self, slot: Short, minibatch: Short, first: Numbers) -> Floats:
        """When each action started; `place` is then where each rank stands."""
        ranks = np.arange(len(first))
        self.place = place = np.array(first)
        self.free = free = np.zeros(len(first))
        self.copying = np.zeros(len(first))
        starts = np.zeros(len(slot))
        done, needs, cost, lines = self.done, self.needs, self.cost, self.lines
        copies, reduces = bool(self.copied.any()), bool(self.joined.size)
        while True:
            rank, at = ranks, place
            what, number = slot[at], minibatch[at]
            ready = done[needs[what] + number[:, None]].max(axis=1)
            can = np.flatnonzero(ready < inf)
            if not can.size:
                return starts
            if can.size < len(ranks):
                rank, at, what, number, ready = can, place[can], what[can], number[can], ready[can]
            start = np.maximum(ready, free[rank])
            starts[at] = start
            end = start + cost[what]
            free[rank] = end
            place[rank] += 1
            for made, used, carried in self.makes:
                line = used[what]
                there = np.maximum(lines[line], end) + carried[what]
                lines[line] = there
                lines[self.no_line] = -inf
                done[made[what] + number] = there
            if copies:
                self.copying[rank] += self.copied[what]
            if reduces:
                self.reduce(self.joins[what], number, end)

    def reduce(self, joins: Numbers, number: Short, end: Floats) -> None:
        """Notes the reductions among the actions that have ended."""
        some = np.flatnonzero(joins >= 0)
        if some.size:
            place = joins[some] * self.total + number[some]
            np.maximum.at(self.joined, place, end[some])
            np.subtract.at(self.missing, place, 1)
            full = place[self.missing[place] == 0]
            self.done[self.first_joined + full] = self.joined[full]


def _rows(rows: Sequence[Sequence[int]], fill: int) -> Numbers:
    width = max(map(len, rows))
    return np.array([[*row, *[fill] * (width - len(row))] for row in rows])
