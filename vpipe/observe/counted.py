"""The memory of a rank over time, by count: from the record of its actions and the bytes of what its stages hold.

    weights + gradients + optimizer state                       from beginning to end
    + minibatches in flight x what the first one held           counted once (`vpipe.observe.held_bytes`)
    + older weight versions x weights

Libraries, buffers of messages and what an operation needs while it runs are not in it; the process' own memory,
which is sampled beside it, has all of that.
"""

from __future__ import annotations

from vpipe.observe.counts import counts
from vpipe.observe.events import RankEvents


def counted_memory(events: RankEvents) -> list[tuple[float, int]]:
    """Each change: from this time on, so many bytes; empty where nothing was counted."""
    fixed = sum(2 * held.weights + held.optimizer for held in events.held.values())
    changes = sorted(
        (count.time, stage, count.in_flight, count.versions)
        for stage in events.held
        for count in counts(events.actions, stage)
    )
    now = dict.fromkeys(events.held, 0)
    line = []
    for time, stage, in_flight, versions in changes:
        held = events.held[stage]
        now[stage] = in_flight * held.minibatch + max(0, versions - 1) * held.weights
        line.append((time, fixed + sum(now.values())))
    return line
