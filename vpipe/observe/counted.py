"""The memory of a rank over time, by count: from the record of its actions and the bytes of what its stages hold.

    weights + optimizer state                                   from beginning to end
    + gradients                                                 from a first backward to the end of its update
    + minibatches in flight x what the first one held           counted once (`vpipe.observe.held_bytes`)
    + older weight versions x weights

Libraries, buffers of messages and what an operation needs while it runs are not in it; the process' own memory,
which is sampled beside it, has all of that.
"""

from __future__ import annotations

from collections.abc import Iterator

from vpipe.observe.counts import counts
from vpipe.record.events import RankEvents
from vpipe.schedule import Op


def counted_memory(events: RankEvents) -> list[tuple[float, int]]:
    """Each change: from this time on, so many bytes; empty where nothing was counted."""
    always, now, line = always_bytes(events), dict[tuple[int, str], int](), []
    for time, place, size in sorted(_changes(events)):
        now[place] = size
        line.append((time, always + sum(now.values())))
    return line


def always_bytes(events: RankEvents) -> int:
    return sum(held.weights + held.optimizer for held in events.held.values())


def _changes(events: RankEvents) -> Iterator[tuple[float, tuple[int, str], int]]:
    """From when on a stage holds how much of what."""
    for stage, held in events.held.items():
        for count in counts(events.actions, stage):
            size = count.in_flight * held.minibatch + max(0, count.versions - 1) * held.weights
            yield count.time, (stage, "minibatches"), size
        there = False
        for entry in events.actions:
            if entry.action.stage != stage or entry.evaluation:
                continue
            if entry.action.op in (Op.B, Op.W, Op.STEP) and there == (entry.action.op is Op.STEP):
                there = not there
                yield entry.end, (stage, "gradients"), held.weights if there else 0
