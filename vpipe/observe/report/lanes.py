"""The timeline of a report: a lane a rank, with its actions as columns of small numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vpipe.observe.counts import Count, counts
from vpipe.observe.trace import messages, newest, origin, stages_of
from vpipe.record.events import RankEvents, Recorded
from vpipe.schedule import Op

OPS = tuple(op.value for op in Op)
ACTIONS = 100_000
"""Of all ranks together; of a longer run the end is shown, and the report says so."""


def timeline(ranks: Sequence[RankEvents]) -> dict[str, Any] | None:
    """Times are microseconds from the first action shown; None if no rank has recorded any."""
    shown = newest(ranks, ACTIONS)
    if not shown:
        return None
    began = origin(shown)
    last = max(events.actions[-1].end for events in shown)
    places = {id(entry): place for events in shown for place, entry in enumerate(events.actions)}
    lanes = {events.rank: lane for lane, events in enumerate(shown)}
    return {
        "ops": OPS,
        "end": micro(last - began),
        "before": sum(events.lost for events in ranks) + _count(ranks) - _count(shown),
        "edges": sorted({edge for events in ranks for edge in events.edges}),
        "lanes": [_lane(events, began) for events in shown],
        "messages": [
            [lanes[source], places[id(sent)], lanes[target], places[id(received)]]
            for source, sent, target, received in messages(shown)
        ],
    }


def _lane(events: RankEvents, began: float) -> dict[str, Any]:
    actions = events.actions
    stages = stages_of(events)
    return {
        "rank": events.rank,
        "stages": stages,
        "round_trip": events.clock.round_trip,
        "offset": events.clock.seconds,
        "op": [OPS.index(entry.action.op) for entry in actions],
        "stage": [entry.action.stage for entry in actions],
        "minibatch": [entry.action.minibatch for entry in actions],
        "start": [micro(entry.start - began) for entry in actions],
        "duration": [micro(entry.duration) for entry in actions],
        "wait": [micro(entry.wait) for entry in actions],
        "bytes": [entry.sent + entry.received for entry in actions],
        "version": [entry.version for entry in actions],
        "evaluation": [int(entry.evaluation) for entry in actions],
        "counts": [
            [micro(time - began), in_flight, versions]
            for time, in_flight, versions in _of_all_stages(actions, stages)
        ],
    }


def _of_all_stages(actions: Sequence[Recorded], stages: Sequence[int]) -> list[Count]:
    """What the stages of a rank held together."""
    changes = sorted((count, stage) for stage in stages for count in counts(actions, stage))
    held: dict[int, Count] = {}
    together = []
    for count, stage in changes:
        held[stage] = count
        in_flight = sum(each.in_flight for each in held.values())
        together.append(Count(count.time, in_flight, sum(each.versions for each in held.values())))
    return together


def _count(ranks: Sequence[RankEvents]) -> int:
    return sum(len(events.actions) for events in ranks)


def micro(seconds: float) -> float:
    return round(1e6 * seconds, 1)
