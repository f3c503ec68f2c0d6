"""The record of a run as lanes and lines for the page of a report: measured and predicted actions, memory over time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from vpipe.errors import VPipeError
from vpipe.observe.action_figures import Count, counted_memory, counts
from vpipe.observe.prediction import run_costs, steady_period
from vpipe.observe.trace import messages, newest, origin, stages_of
from vpipe.record.events import RankEvents, Recorded
from vpipe.schedule import Action, Op

OPS = tuple(op.value for op in Op)
ACTIONS = 100_000
"""Of all ranks together; of a longer run the end is shown, and the report says so."""
MEMORY = 1500
"""Points of a line of memory; of a longer one the highest of each stretch are kept."""


def timeline(ranks: Sequence[RankEvents]) -> dict[str, Any] | None:
    """A lane for each rank, with times in microseconds from the first action shown; None without any action."""
    shown = newest(ranks, ACTIONS)
    if not shown:
        return None
    began = origin(shown)
    last = max(events.actions[-1].end for events in shown)
    places = {id(entry): place for events in shown for place, entry in enumerate(events.actions)}
    lanes = {events.rank: lane for lane, events in enumerate(shown)}
    return {
        "ops": OPS,
        "end": _micro(last - began),
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
        **_columns((entry.action, entry.start - began, entry.end - began) for entry in actions),
        "wait": [_micro(entry.wait) for entry in actions],
        "bytes": [entry.sent + entry.received for entry in actions],
        "version": [entry.version for entry in actions],
        "evaluation": [int(entry.evaluation) for entry in actions],
        "counts": [
            [_micro(time - began), in_flight, versions]
            for time, in_flight, versions in _of_all_stages(actions, stages)
        ],
    }


def _columns(actions: Iterable[tuple[Action, float, float]]) -> dict[str, list[float]]:
    """A list for each property of the actions, which are given with their start and end."""
    rows = [(*action, start, end) for action, start, end in actions]
    return {
        "op": [OPS.index(op) for _, op, *_ in rows],
        "stage": [stage for stage, *_ in rows],
        "minibatch": [minibatch for _, _, minibatch, *_ in rows],
        "start": [_micro(start) for *_, start, _ in rows],
        "duration": [_micro(end - start) for *_, start, end in rows],
    }


def _of_all_stages(actions: Sequence[Recorded], stages: Sequence[int]) -> list[Count]:
    """Minibatches and versions that the stages of a rank held together."""
    changes = sorted((count, stage) for stage in stages for count in counts(actions, stage))
    held: dict[int, Count] = {}
    together = []
    for count, stage in changes:
        held[stage] = count
        in_flight = sum(each.in_flight for each in held.values())
        together.append(Count(count.time, in_flight, sum(each.versions for each in held.values())))
    return together


def predicted(folder: Path, ranks: Sequence[RankEvents]) -> dict[str, Any] | None:
    """One period of the simulated schedule, which the page repeats: minibatches and times count from its beginning.

    None where the run cannot be simulated.
    """
    costs = run_costs(folder, ranks) if ranks else None
    if costs is None:
        return None
    try:
        simulation = costs.simulate(timeline=True)
    except VPipeError:
        return None
    assert simulation.timeline is not None
    period, seconds = steady_period(costs.schedule, simulation)
    events = [event for event in simulation.timeline.events if event.action.minibatch in period]
    began = min(event.start for event in events)
    return {
        "source": costs.source,
        "word": costs.word,
        "minibatches": len(period),
        "period": _micro(seconds),
        "lanes": [
            {
                "rank": figures.rank,
                **_columns(
                    (action._replace(minibatch=action.minibatch - period.start), start - began, end - began)
                    for rank, action, start, end in events
                    if rank == figures.rank
                ),
                "bubble": figures.bubble,
                "peak_memory": figures.memory.total,
            }
            for figures in simulation.ranks
        ],
        "seconds_per_update": simulation.step_time,
        "samples_per_s": simulation.samples_per_second,
        "bubble_share": simulation.bubble,
    }


def memory_lines(ranks: Sequence[RankEvents]) -> list[dict[str, Any]]:
    """For each rank its memory by count and as sampled, in seconds from the first action and bytes."""
    began = origin(ranks)
    return [
        {
            "rank": events.rank,
            "stages": sorted(events.held),
            "counted": _line(counted_memory(events), began),
            "process": _line((sample for sample in events.memory if sample[0] >= began), began),
            "of": events.memory_of,
        }
        for events in ranks
        if events.held or events.memory
    ]


def _line(samples: Iterable[tuple[float, int]], began: float) -> list[list[float]]:
    points = [[round(time - began, 6), count] for time, count in samples]
    step = -(-len(points) // MEMORY)
    if step < 2:
        return points
    return [max(points[at : at + step], key=lambda point: point[1]) for at in range(0, len(points), step)]


def _count(ranks: Sequence[RankEvents]) -> int:
    return sum(len(events.actions) for events in ranks)


def _micro(seconds: float) -> float:
    return round(1e6 * seconds, 1)
