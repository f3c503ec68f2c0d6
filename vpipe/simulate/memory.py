"""The memory of a rank, followed through its events: what every minibatch in flight holds, and old weights.

Always there are the weights, the optimizer's state, what libraries hold, and for each cut to another rank room for two
messages each way: the one in use and the one under way. A stage that shares a parameter with another one holds
gradients of it on their way, their sum, and in asynchronous schedules those of the updates that the other is behind
(`Profile.exchange_buffers`).

Gradients are as large as the weights. Where an update follows every backward they come with it, block by block, and go
with the update's end:

    rank         F3      B1          STEP1                F4
    activations  + held  + backward
                 ------- - held
    gradients            + some
                         + the rest  + update_bytes
                                     - update_bytes, all
    old weights                      + those that F3 read

Everywhere else they are taken to be always there: between updates a little less is, before the first backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from vpipe.cost import DeviceCost
from vpipe.schedule import Event, Op
from vpipe.simulate.stage_cost import StageCost

F, B, I, W, STEP = Op.F, Op.B, Op.I, Op.W, Op.STEP  # noqa: E741 (members are slow to look up)


class RankMemory(NamedTuple):
    """Bytes of a rank at its peak, by what they hold."""

    weights: int
    versions: int
    """Weights that are not the newest, for minibatches that read them."""
    gradients: int
    """And what an update makes of them for itself."""
    optimizer: int
    activations: int
    """Of minibatches in flight, and what a backward needs."""
    buffers: int

    @property
    def total(self) -> int:
        return sum(self)


class Totals(NamedTuple):
    """What one rank's run comes to."""

    begin: float
    end: float
    activations: int
    gradients: int
    versions: int
    """Bytes at the rank's peak; of gradients those that are not always there."""
    most_activations: int
    in_flight: dict[int, int]
    live: dict[int, int]
    """By stage: the most minibatches between F and backward, and the most live versions of the weights."""


class Change(NamedTuple):
    """The bytes that come, or go, with the start and with the end of an operation; old weights are not counted."""

    at_start: int = 0
    at_end: int = 0
    gradients_at_start: int = 0
    gradients_at_end: int = 0


def changes(cost: StageCost) -> dict[Op, Change]:
    made, left = cost.held + cost.swapped, cost.parameters if cost.fresh else 0
    backward, some = cost.whole_backward, cost.backward_gradients
    return dict.fromkeys(Op, Change()) | {
        F: Change(made),
        B: Change(backward, -made - backward, some, left - some),
        I: Change(cost.input_backward, cost.deferred - made - cost.input_backward),
        W: Change(0, -cost.deferred),
        STEP: Change(0, 0, cost.updating, -left - cost.updating),
    }


class Stash:
    """The minibatches that one stage has in flight on one rank, and the weights that they read."""

    def __init__(self, cost: StageCost) -> None:
        self.cost = cost
        self.changes = changes(cost)
        self.idle = True  # no backward since the last update
        self.newest = 0
        self.readers = 0  # of the newest version
        self.read: dict[int, int] = {}
        self.old: dict[int, int] = {}  # older version: minibatches in flight that read it
        self.most_in_flight = 0
        self.most_versions = 1

    def forward(self, minibatch: int) -> None:
        read = self.read
        read[minibatch] = self.newest
        self.readers += 1
        if len(read) > self.most_in_flight:
            self.most_in_flight = len(read)

    def backward(self, minibatch: int) -> int:
        """The bytes of old weights that nobody needs any more."""
        self.idle = False
        version = self.read.pop(minibatch)
        if version == self.newest:
            self.readers -= 1
            return 0
        left = self.old[version] - 1
        if left:
            self.old[version] = left
            return 0
        del self.old[version]
        return self.cost.parameters

    def step(self) -> int:
        """The bytes of weights that were the newest and are still needed."""
        newest, readers = self.newest, self.readers
        self.newest = newest + 1
        if not readers:
            return 0
        self.old[newest] = readers
        self.readers = 0
        if len(self.old) >= self.most_versions:
            self.most_versions = len(self.old) + 1
        return self.cost.parameters


class Ledger:
    """One rank's memory, and when it began and ended. Events are noted in the rank's order."""

    def __init__(self, costs: Mapping[int, StageCost], sampled: bool) -> None:
        self.stashes = {stage: Stash(cost) for stage, cost in costs.items()}
        self.begin: float | None = None
        self.end = 0.0
        self.activations = self.gradients = self.versions = 0
        self.peak = self.most_activations = 0
        self.at_peak = (0, 0, 0)
        self.samples: list[tuple[float, int]] | None = [] if sampled else None

    def note(self, event: Event) -> None:
        _, (stage, op, minibatch), start, end = event
        self.end = end
        stash = self.stashes[stage]
        at_start, at_end, coming, going = stash.changes[op]
        new = old = 0
        if op is F:
            if self.begin is None:
                self.begin = start
            stash.forward(minibatch)
        elif op is B or op is W:
            old = -stash.backward(minibatch)
        elif op is STEP:
            if stash.idle and stash.cost.fresh:  # a last update to which this rank has nothing to add
                going += stash.cost.parameters
            new, stash.idle = stash.step(), True
        if at_start or coming or new or op is F:
            self.change(start, at_start, coming, new)
        if at_end or going or old:
            self.change(end, at_end, going, old)

    def totals(self) -> Totals:
        in_flight = {stage: stash.most_in_flight for stage, stash in self.stashes.items()}
        live = {stage: stash.most_versions for stage, stash in self.stashes.items()}
        return Totals(self.begin or 0.0, self.end, *self.at_peak, self.most_activations, in_flight, live)

    def change(self, time: float, activations: int, gradients: int, versions: int) -> None:
        self.activations += activations
        self.gradients += gradients
        self.versions += versions
        total = self.activations + self.gradients + self.versions
        if self.activations > self.most_activations:
            self.most_activations = self.activations
        if total > self.peak:
            self.peak = total
            self.at_peak = (self.activations, self.gradients, self.versions)
        if self.samples is not None:
            self.samples.append((time, total))


class TimedLedger(Ledger):
    """The ledger of a rank that swaps: copies change its memory at times of their own, so changes are sorted.

    At equal times what is copied out goes first and what is copied in comes last; the rank's own go by its program.
    """

    def __init__(self, costs: Mapping[int, StageCost], sampled: bool) -> None:
        super().__init__(costs, sampled)
        self.coming: list[tuple[float, float, int, int, int]] = []
        self.noted = 0

    def change(self, time: float, activations: int, gradients: int, versions: int) -> None:
        self.noted += 1
        heappush(self.coming, (time, self.noted, activations, gradients, versions))

    def copied(self, time: float, size: int) -> None:
        """Bytes that came with a copy, or went."""
        heappush(self.coming, (time, inf if size > 0 else 0, size, 0, 0))

    def settle(self, time: float) -> None:
        """No change before `time` is still to come."""
        while self.coming and self.coming[0][0] < time:
            moment, _, *change = heappop(self.coming)
            super().change(moment, *change)


def fixed_memory(costs: Mapping[int, StageCost], optimizer_ratio: float, buffers: int) -> RankMemory:
    """What a rank holds from beginning to end."""
    weights = sum(cost.parameters for cost in costs.values())
    gradients = sum(cost.parameters for cost in costs.values() if not cost.fresh)
    return RankMemory(weights, 0, gradients, round(weights * optimizer_ratio), 0, buffers)


def cuda_graph_memory(
    fixed: RankMemory, costs: Mapping[int, StageCost], found: Totals, device: DeviceCost, split: bool
) -> RankMemory:
    """The memory of a rank whose stages are replayed from CUDA graphs: taken once, it is never given back.

    in flight  of each minibatch: what its forward needs and saves, its outputs, gradients received and sent
    shared     what a backward needs beyond that, once for a stage; where backward is split, for each minibatch
    gradients  always there, since the graphs add to them
    versions   as many as are ever live
    update     what the largest of its stages needs
    buffers    the libraries' workspace a second time, for the stream of the captures; and a copy of gradients that
               are exchanged, since the next ones are written to their memory
    """
    activations = versions = updating = 0
    buffers = fixed.buffers + device.workspace
    for stage, cost in costs.items():
        one = cost.held + 2 * cost.sent + cost.received + device.slack
        one += max(cost.passing, cost.input_backward if split else 0)
        buffers += cost.exchanged
        activations += found.in_flight[stage] * one + (0 if split else cost.whole_backward)
        versions += (found.live[stage] - 1) * cost.parameters
        updating = max(updating, cost.updating)
    gradients = fixed.gradients + updating
    return fixed._replace(activations=activations, gradients=gradients, versions=versions, buffers=buffers)
