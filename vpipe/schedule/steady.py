"""The steady part of an asynchronous run: what is left without filling and draining.

It is taken on the rank with the most work for a minibatch, between the starts of two of its backwards: the first
after as many minibatches as fill the pipeline, the last as many before the end. Between them lie equally many
forwards, backwards and updates, so the rate can never seem higher than that rank's work allows; and since no rank
can run away from the others for long, its rate is the pipeline's.

A table has no steady part: it is run again and again, and the pipeline is filled and drained each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import lcm

from vpipe.schedule.action import COMPUTE, Op
from vpipe.schedule.lowering import as_run
from vpipe.schedule.program import Schedule
from vpipe.schedule.walk import Event, unit_cost, walk


class SteadyPart:
    def __init__(self, schedule: Schedule, work: Sequence[float]) -> None:
        """`work`: each rank's for a minibatch."""
        in_line = (rank for ranks in schedule.placement for rank in ranks)  # whatever their numbers are
        self.rank = max(in_line, key=lambda rank: work[rank])
        self.stage = schedule.stages_of(self.rank)[0]
        self.total = schedule.minibatches or 0
        self.exists = schedule.lazy and not schedule.synchronous
        self.margin = schedule.filling
        self.period = lcm(schedule.update_interval, *(len(ranks) for ranks in schedule.placement))
        self.starts: dict[int, float] = {}

    def note(self, event: Event) -> None:
        action = event.action
        if action.stage == self.stage and (action.op is Op.B or action.op is Op.I):
            self.starts[action.minibatch] = event.start

    def seconds_per_minibatch(self) -> float | None:
        """None: there is no steady part, or the run is too short to have one."""
        inner = [m for m in sorted(self.starts) if self.margin <= m < self.total - self.margin]
        if not inner or not self.exists:
            return None
        first = inner[0]
        # Whole rounds of updates and replicas only, so that each is in it equally often.
        last = first + (inner[-1] - first) // self.period * self.period
        return (self.starts[last] - self.starts[first]) / (last - first) if last > first else None


def enough_minibatches(filling: int, update_interval: int) -> int:
    """So many that there is a steady part between filling, which takes so many, and draining."""
    return 6 * filling + 4 * update_interval


def steady_bubble(schedule: Schedule) -> float | None:
    """The share of all ranks' time in the steady part in which nothing is computed; None: there is no such part.

    It is that of an endless run: how many minibatches the schedule is built for has no part in it.
    """
    if schedule.synchronous or not schedule.lazy:
        return None
    minibatches = enough_minibatches(schedule.filling, schedule.update_interval)
    longer = replace(schedule, minibatches=minibatches)
    busy = [0.0] * schedule.num_ranks
    events = list(walk(as_run(longer)))
    for event in events:
        if event.action.op in COMPUTE:
            busy[event.rank] += unit_cost(event.action)
    part = SteadyPart(longer, [time / minibatches for time in busy])
    for event in events:
        if event.rank == part.rank:
            part.note(event)
    seconds = part.seconds_per_minibatch()
    if not seconds:
        return None
    return max(0.0, 1 - sum(busy) / minibatches / (seconds * schedule.num_ranks))
