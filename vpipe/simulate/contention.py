"""Contention of ranks that share a GPU or the cores of a host: an action is quicker while others wait.

How much longer than measured an action takes changes while it runs, with the number of ranks that compute:

    rank 0    ▪▪▪▪▪ ▪▪▪▪▪ ▪▪▪▪▪▪▪ ▪▪▪▪▪▪▪       ▪▪▪▪▪▪▪      nobody else computes during the first, all do later
    rank 1          ▪▪▪▪▪ ▪▪▪▪▪▪▪ ▪▪▪▪▪▪▪ ▪▪▪▪▪ ▪▪▪▪▪▪▪

Who computes when depends on these times: they are found by simulating a few times over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from vpipe.cost import SharedRanks
from vpipe.schedule import Action, Event, Op

STRIDE = 0.5
"""How far a factor goes from one simulation to the next, of the way to what that one shows."""
COMPUTING = frozenset({Op.F, Op.B, Op.I, Op.W, Op.STEP})


class Contention(NamedTuple):
    """Factors for the times of the profile."""

    factors: Mapping[Action, float]
    means: tuple[float, ...]
    """Of all actions of each rank."""


def contention_of(
    events: Sequence[Event],
    ranks: int,
    shared: Sequence[SharedRanks],
    seconds: Sequence[Mapping[Op, float]],
    before: Contention | None = None,
) -> Contention:
    """From the events of a run; `seconds` are the profile's, of each stage's operations.

    `before`: with what that run was simulated. Where actions are longer, others begin later and slow less down: factors
    would swing around those that they tend to.
    """
    own: list[list[Event]] = [[] for _ in range(ranks)]
    for event in events:
        if event.action.op in COMPUTING:
            own[event.rank].append(event)
    factors: dict[Action, float] = {}
    means = [1.0] * ranks
    for group in shared:
        found = list(chain.from_iterable(own[rank] for rank in group.ranks))
        for event, factor in zip(found, _factors(found, group.factors), strict=True):
            old = factor if before is None else before.factors[event.action]
            factors[event.action] = old + STRIDE * (factor - old)
        for rank in group.ranks:
            full = sum(seconds[event.action.stage][event.action.op] for event in own[rank])
            longer = sum(
                seconds[event.action.stage][event.action.op] * factors[event.action] for event in own[rank]
            )
            means[rank] = longer / full if full else 1.0
    return Contention(factors, tuple(means))


def _factors(events: Sequence[Event], by_busy: Sequence[float]) -> list[float]:
    """How much longer than measured each takes: the time that it lasted over the work that is done in it."""
    if not events:
        return []
    starts, ends = (np.array([getattr(event, side) for event in events]) for side in ("start", "end"))
    changes = np.concatenate([ends, starts])
    order = np.argsort(changes, kind="stable")
    times = changes[order]
    busy = np.maximum(np.cumsum(np.repeat([-1, 1], len(events))[order])[:-1], 0)  # an event may last no time
    done = np.concatenate([[0.0], np.cumsum(np.diff(times) / np.array(by_busy)[busy])])
    worked = np.interp(ends, times, done) - np.interp(starts, times, done)
    alone = np.full(len(events), float(by_busy[1]))
    return np.divide(ends - starts, worked, out=alone, where=worked > 0).tolist()
