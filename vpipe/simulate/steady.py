"""The steady part of an asynchronous run: what is left without filling and draining.

It is taken on the rank with the most work for a minibatch, between the starts of two of its backwards: the first
after as many minibatches as the pipeline has ranks, the last as many before the end. Between them lie equally many
forwards, backwards and updates, so the rate can never seem higher than that rank's work allows; and since no rank
can run away from the others for long, its rate is the pipeline's.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from vpipe.schedule import Event, Op, Schedule


class SteadyPart:
    def __init__(self, schedule: Schedule, work: Sequence[float]) -> None:
        """`work`: each rank's for a minibatch."""
        self.rank = max(range(schedule.num_ranks), key=lambda rank: work[rank])
        self.stage = schedule.stages_of(self.rank)[0]
        self.replicas = len(schedule.placement[self.stage])
        self.total = schedule.minibatches or 0
        self.margin = schedule.num_ranks
        self.period = lcm(schedule.update_interval, *(len(ranks) for ranks in schedule.placement))
        self.starts: dict[int, float] = {}

    def note(self, event: Event) -> None:
        action = event.action
        if action.stage == self.stage and (action.op is Op.B or action.op is Op.I):
            self.starts[action.minibatch] = event.start

    def seconds_per_minibatch(self) -> float | None:
        """None: the run is too short to have a steady part."""
        inner = [m for m in sorted(self.starts) if self.margin <= m < self.total - self.margin]
        if not inner:
            return None
        first = inner[0]
        # Whole rounds of updates and replicas only, so that each is in it equally often.
        last = first + (inner[-1] - first) // self.period * self.period
        return (self.starts[last] - self.starts[first]) / (last - first) if last > first else None
