"""What ranks come to, from their whole programs at once: `Ledger`'s sums as columns of numbers.

Without host links nothing that a rank holds depends on the clock: its program alone tells what is in flight and which
old weights are still read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vpipe.schedule import Op, Schedule
from vpipe.simulate.memory import Totals, changes
from vpipe.simulate.slots import PLACE
from vpipe.simulate.stage_cost import StageCost
from vpipe.simulate.waves import Numbers, Waves

F, B, I, W, STEP = (PLACE[op] for op in (Op.F, Op.B, Op.I, Op.W, Op.STEP))  # noqa: E741
LARGEST = 2**62
"""Bytes that are counted in 64 bits; more are counted by Python."""


class Tallies:
    def __init__(self, schedule: Schedule, waves: Waves, costs: Sequence[StageCost]) -> None:
        self.schedule = schedule
        self.waves = waves
        self.costs = costs
        slots = waves.slots
        self.stage, self.op = np.empty(slots.end, dtype=np.int64), np.empty(slots.end, dtype=np.int64)
        changed = [changes(cost) for cost in costs]
        most = max(
            cost.parameters + max(abs(size) for change in found.values() for size in change)
            for cost, found in zip(costs, changed, strict=True)
        )
        self.kind: Any = np.int64 if 2 * most * len(waves.slot) < LARGEST else object
        self.changes = np.zeros((slots.end, 2, 2), dtype=self.kind)  # of activations and gradients
        for slot, stage, _, op in slots:
            self.stage[slot], self.op[slot] = stage, PLACE[op]
            self.changes[slot] = np.array(changed[stage][op], dtype=self.kind).reshape(2, 2)

    def totals(self, rank: int) -> Totals | None:
        """None: an update does not follow right after its own backwards; then only `walk` can tell."""
        slot, minibatch, starts = self.waves.program(rank)
        stage, op = self.stage[slot], self.op[slot]
        old = np.zeros(
            (len(slot), 2), dtype=self.kind
        )  # changes of old weights, at start and end of each action
        changes = self.changes[slot]
        in_flight, versions = {}, {}
        for number in self.schedule.stages_of(rank):
            own = stage == number
            forwards = np.flatnonzero(own & (op == F))
            backwards = np.flatnonzero(own & ((op == B) | (op == W)))
            steps = np.flatnonzero(own & (op == STEP))
            done = np.searchsorted(backwards, steps)
            if not self.in_turn(number, rank, minibatch[steps], done):
                return None
            if self.costs[number].fresh:
                idle = steps[np.diff(done, prepend=0) == 0]  # they have no gradients to give back
                changes[idle, 1, 1] += self.costs[number].parameters
            gone = np.zeros(self.schedule.minibatches or 0, dtype=np.int64)
            gone[minibatch[backwards]] = backwards
            since, until = old_versions(forwards, gone[minibatch[forwards]], steps)
            old[since, 0] += self.costs[number].parameters
            old[until, 1] -= self.costs[number].parameters
            in_flight[number] = _most(len(slot), forwards, backwards)
            versions[number] = 1 + _most(len(slot), since, until)
        activations, gradients, weights = (
            np.cumsum(column) for column in (changes[:, 0], changes[:, 1], old)
        )
        begin, end = 0.0, float(self.waves.ends[rank])
        if not len(slot):
            return Totals(begin, end, 0, 0, 0, 0, in_flight, versions)
        begin = float(starts[np.argmax(op == F)])
        peak = int(np.argmax(activations + gradients + weights))
        return Totals(
            begin,
            end,
            int(activations[peak]),
            int(gradients[peak]),
            int(weights[peak]),
            int(activations.max()),
            in_flight,
            versions,
        )

    def backward_starts(self, rank: int, stage: int) -> dict[int, float]:
        """When the backward of each minibatch, or its first part, started."""
        slot, minibatch, starts = self.waves.program(rank)
        op = self.op[slot]
        own = (self.stage[slot] == stage) & ((op == B) | (op == I))
        return dict(zip(minibatch[own].tolist(), starts[own].tolist(), strict=True))

    def in_turn(self, stage: int, rank: int, lasts: npt.NDArray[Any], done: Numbers) -> bool:
        """Whether before each update, which bears its last minibatch, exactly the backwards up to it are `done`."""
        ranks = self.schedule.placement[stage]
        return np.array_equal((lasts - ranks.index(rank)) // len(ranks) + 1, done)


def old_versions(forwards: Numbers, gone: Numbers, steps: Numbers) -> tuple[Numbers, Numbers]:
    """Since when and until when weights are held that are not the newest, as places in the program.

    `gone`: the place of the backward of each forward's minibatch.
    """
    read = np.searchsorted(
        steps, forwards
    )  # the version that each forward reads: as many as were made before
    version, first = np.unique(read, return_index=True)
    if not version.size:
        return version, version
    until = np.maximum.reduceat(gone, first)
    replaced = version < len(steps)
    since, until = steps[version[replaced]], until[replaced]
    held = until > since
    return since[held], until[held]


def _most(length: int, begins: Numbers, ends: Numbers) -> int:
    """The most that there ever are of what begins and ends at these places."""
    change = np.zeros(length, dtype=np.int64)
    change[begins] += 1
    change[ends] -= 1
    return int(np.cumsum(change).max(initial=0))
