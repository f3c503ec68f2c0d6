"""Contention of ranks that share a device: an action is quicker while others wait.

The profile has the times while all of them compute, `crowding` times those of one alone. Between the two an action's
time grows with the share of it in which the others compute:

    rank 0    ▪▪▪▪▪ ▪▪▪▪▪ ▪▪▪▪▪▪▪ ▪▪▪▪▪▪▪       ▪▪▪▪▪▪▪      nobody else computes during the first, all do later
    rank 1          ▪▪▪▪▪ ▪▪▪▪▪▪▪ ▪▪▪▪▪▪▪ ▪▪▪▪▪ ▪▪▪▪▪▪▪

Who computes when depends on these times: they are found by simulating a few times over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vpipe.cost import DeviceCost
from vpipe.schedule import Action, Event, Op

COMPUTING = frozenset({Op.F, Op.B, Op.I, Op.W, Op.STEP})
Times = npt.NDArray[np.float64]


class Contention(NamedTuple):
    """Factors for the times of the profile."""

    factors: Mapping[Action, float]
    means: tuple[float, ...]
    """Of all actions of each rank."""


class _Busy:
    """When one rank computes: its actions follow each other."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.starts = np.array([event.start for event in events])
        self.ends = np.array([event.end for event in events])
        self.before = np.concatenate([[0.0], np.cumsum(self.ends - self.starts)])

    def until(self, times: Times) -> Times:
        """Seconds that it has computed by then."""
        if not len(self.starts):
            return np.zeros_like(times)
        last = np.searchsorted(self.starts, times, side="right") - 1
        begun = np.maximum(last, 0)
        part = np.minimum(times, self.ends[begun]) - self.starts[begun]
        return np.where(last < 0, 0.0, self.before[begun] + part)


def contention_of(
    events: Sequence[Event], ranks: int, device: DeviceCost, seconds: Sequence[Mapping[Op, float]]
) -> Contention:
    """From the events of a run, in order on each rank; `seconds` are the profile's, of each stage's operations.

    Ranks of the device that are not in the run wait all the time.
    """
    own = [
        [event for event in events if event.rank == rank and event.action.op in COMPUTING]
        for rank in range(ranks)
    ]
    busy = [_Busy(found) for found in own]
    factors: dict[Action, float] = {}
    means = []
    for rank, found in enumerate(own):
        first = rank // device.shared_by * device.shared_by
        others = [
            busy[other] for other in range(first, min(first + device.shared_by, ranks)) if other != rank
        ]
        starts, ends = busy[rank].starts, busy[rank].ends
        beside = sum((other.until(ends) - other.until(starts) for other in others), np.zeros(len(found)))
        lasted = ends - starts
        share = np.divide(beside, lasted * (device.shared_by - 1), out=np.zeros(len(found)), where=lasted > 0)
        factor = (1 + (device.crowding - 1) * share) / device.crowding
        factors |= zip((event.action for event in found), factor.tolist(), strict=True)
        full = np.array([seconds[event.action.stage][event.action.op] for event in found])
        means.append(float(full @ factor / full.sum()) if full.sum() else 1.0)
    return Contention(factors, tuple(means))
