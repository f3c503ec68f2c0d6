"""What a synchronous step takes at least, so that plans which cannot win need not be simulated, nor even searched.

    rank 0    F ........................................ B     its step: from its first action to its last
    rank k        F F F B F B F B ... B B B                    all of this lies in it
              |--|                      |--|
              the first minibatch       the last one comes
              comes down to rank k      back from rank k

So a step is at least the work of any rank, and for each rank also its work with the way down to it and back. Where
backward is split, gradients of weights are not on the way back: as many as may wait at a rank's last I run beside it.
Messages and copies to the host only add to that. Where links differ, what a rank copies itself is left out: it is not
known here. Ranks that share a device are quicker while others wait, at most by its `crowding`.

All is told in seconds a minibatch, which makes it a floor (`reach.py`) of slices, too: the way down to a slice and back
depends on the blocks before it, not on how they are cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np

from vpipe.cost import Profile
from vpipe.plan.model import Slice, Time, copy_seconds, update_seconds
from vpipe.plan.reach import Floor, Floors
from vpipe.plan.slices import TimeCosts

ROUNDING = 1 - 1e-9
"""Sums of other orders."""


class StagePart(Protocol):
    @property
    def slice(self) -> Slice: ...


class Rank(Protocol):
    """One position of a plan."""

    @property
    def stages(self) -> Sequence[StagePart]: ...
    @property
    def time(self) -> Time: ...


def least_step(profile: Profile, positions: Sequence[Rank], minibatches: int) -> float:
    """A floor for the seconds of a plan."""
    blocks, found = profile.blocks, 0.0
    split = positions[0].stages[0].slice.load.split
    ways = [0.0, *accumulate(b.forward + (b.input_gradient if split else b.backward) for b in blocks)]
    for position in positions:
        slices = [stage.slice for stage in position.stages]
        replicas = slices[0].load.replicas
        work = position.time.compute
        bare = work - sum(update_seconds(profile, piece) for piece in slices)
        if profile.links:
            work = bare = bare - sum(sum(copy_seconds(profile, piece)) for piece in slices)
        beside = sum(_beside(profile, piece) for piece in slices) if split else 0.0
        way = ways[min(piece.start for piece in slices)]
        found = max(
            found,
            position.time.host / replicas,
            work / replicas,
            bare / replicas + (way - beside) / minibatches,
        )
    return found * ROUNDING / profile.device.crowding


def _beside(profile: Profile, piece: Slice) -> float:
    """Gradients of weights that may be left at the end."""
    own = sum(block.weight_gradient for block in profile.blocks[piece.start : piece.stop])
    return (piece.load.waiting + 1) * (own + profile.device.overhead)


def step_floors(costs: TimeCosts, minibatches: int) -> Floors:
    """The same for slices that lie one behind the other, in any cut."""
    profile, sums, replicas = costs.profile, costs.sums, costs.replicas
    overhead = profile.device.overhead
    weights = np.array([0.0, *accumulate(block.weight_gradient for block in profile.blocks)])
    split = sums.split
    beside = split * np.minimum((sums.waiting + 1) / minibatches, 1 / replicas)
    window = Floor(
        sums.compute / replicas - beside * weights,
        costs.runtime / replicas - beside * overhead,
        (sums.compute - (weights if split.any() else 0.0)) / minibatches,
    )
    work, always = costs.floors
    if profile.links:
        work = [Floor(sums.compute / replicas, costs.runtime / replicas)]
    return Floors([*work, window], always)
