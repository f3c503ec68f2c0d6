"""Traces of a real or a simulated run in the Chrome trace format, for Perfetto and chrome://tracing.

One track a rank, arrows for messages, counters for memory, minibatches and versions. Times come in seconds; the files
have microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vpipe.errors import ConfigError
from vpipe.observe.action_figures import counted_memory, counts
from vpipe.record.events import RankEvents, Recorded, read_events
from vpipe.schedule import Action, Event, Op
from vpipe.simulate.simulation import Simulation, Timeline
from vpipe.system.files import replacing

Entry = dict[str, Any]
TRACE = "trace.json"

LOOK = {
    Op.F: ("forward", "thread_state_running"),
    Op.B: ("backward", "rail_animation"),
    Op.I: ("input gradient", "rail_animation"),
    Op.W: ("weight gradient", "rail_load"),
    Op.STEP: ("update", "startup"),
    Op.REDUCE: ("REDUCE", "rail_idle"),
}
"""The category of an operation and its colour, by names that the viewers know; all others are grey."""
MESSAGES = {Op.SEND_F: Op.RECV_F, Op.SEND_B: Op.RECV_B}
ACTIONS = 50_000
"""Of all ranks together; of a longer run the end is traced. Viewers get slow with more."""


def write_trace(folder: Path) -> Path:
    """Write `trace.json` beside the events of a run."""
    ranks = read_events(folder)
    if not ranks:
        raise ConfigError(f"{folder}: holds no events.<rank>.json: there is nothing to trace")
    path = folder / TRACE
    _write(trace_entries(newest(ranks, ACTIONS)), path)
    return path


def write_simulated_trace(simulation: Simulation, path: Path) -> None:
    _write(simulated_entries(simulation), path)


def _write(entries: Iterable[Entry], path: Path) -> None:
    """Entries are written one by one: a trace may be large."""
    with replacing(path) as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for number, entry in enumerate(entries):
            file.write((",\n" if number else "") + json.dumps(entry, separators=(",", ":"), allow_nan=False))
        file.write("\n]}\n")


# A real run


def trace_entries(ranks: Sequence[RankEvents]) -> Iterator[Entry]:
    """The first action starts at 0."""
    began = origin(ranks)
    yield _process("measured")
    for events in ranks:
        rank, stages = events.rank, stages_of(events)
        yield from _track(rank, stages)
        for entry in events.actions:
            yield _slice(rank, entry.action, entry.start - began, entry.end - began, **_details(entry))
        for time, held in counted_memory(events):
            yield _counter(f"memory by count, rank {rank}", time - began, bytes=held)
        for time, held in events.memory:
            if time >= began:
                yield _counter(f"memory of the {events.memory_of}, rank {rank}", time - began, bytes=held)
        for stage in stages:
            for time, in_flight, versions in counts(events.actions, stage):
                place = f"stage {stage} on rank {rank}"
                yield _counter(f"minibatches in flight, {place}", time - began, minibatches=in_flight)
                yield _counter(f"weight versions, {place}", time - began, versions=versions)
    for number, (source, sent, target, received) in enumerate(messages(ranks)):
        yield from _arrow(number, source, sent.start - began, target, received.end - began)


def _details(entry: Recorded) -> dict[str, float | str]:
    details = {
        "bytes sent": entry.sent,
        "bytes received": entry.received,
        "waited ms": round(1000 * entry.wait, 4) if entry.wait else 0,
        "of": "an evaluation" if entry.evaluation else "",
    }
    version = {"weight version": entry.version} if entry.version >= 0 else {}
    return {key: value for key, value in details.items() if value} | version


def messages(ranks: Sequence[RankEvents]) -> Iterator[tuple[int, Recorded, int, Recorded]]:
    """Each send with its receive, as (rank, send, rank, receive), where both are in the record."""
    found: dict[Action, tuple[int, Recorded]] = {
        entry.action: (events.rank, entry)
        for events in ranks
        for entry in events.actions
        if not entry.evaluation
    }
    edges = sorted({edge for events in ranks for edge in events.edges})
    for (stage, op, minibatch), (rank, sent) in found.items():
        for producer, reader in edges if op in MESSAGES else ():
            source, target = (producer, reader) if op is Op.SEND_F else (reader, producer)
            receive = found.get(Action(target, MESSAGES[op], minibatch))
            if source == stage and receive is not None and receive[0] != rank:
                yield rank, sent, *receive


def newest(ranks: Sequence[RankEvents], most: int) -> list[RankEvents]:
    """The last `most` actions, of those after the time at which every rank's record has begun."""
    begins = [events.actions[0].start for events in ranks if events.lost and events.actions]
    starts = sorted((entry.start for events in ranks for entry in events.actions), reverse=True)
    begin = max([*begins, *starts[most - 1 : most]], default=float("-inf"))
    cut = [
        replace(events, actions=tuple(entry for entry in events.actions if entry.start >= begin))
        for events in ranks
    ]
    return [events for events in cut if events.actions]


def origin(ranks: Sequence[RankEvents]) -> float:
    """The time of the first action."""
    return min((events.actions[0].start for events in ranks if events.actions), default=0.0)


def stages_of(events: RankEvents) -> list[int]:
    return sorted({entry.action.stage for entry in events.actions})


# A simulated run


def simulated_entries(simulation: Simulation) -> Iterator[Entry]:
    assert simulation.timeline is not None, "simulate with timeline=True"
    yield _process(f"simulated {simulation.schedule}")
    for rank in simulation.ranks:
        yield from _track(rank.rank, rank.stages)
    yield from (_slice(*event) for event in simulation.timeline.events)
    for number, (made, read) in enumerate(_transfers(simulation.timeline)):
        yield from _arrow(number, made.rank, made.end, read.rank, read.start)
    for rank, samples in zip(simulation.ranks, simulation.timeline.memory, strict=True):
        fixed = rank.memory.total - max((held for _, held in samples), default=0)
        for time, held in ((0.0, 0), *samples):
            yield _counter(f"memory of rank {rank.rank}", time, bytes=fixed + held)


def _transfers(timeline: Timeline) -> Iterator[tuple[Event, Event]]:
    """From F to the F of each reader, and from I or B to that of each producer, where they are on other ranks."""
    found: dict[Action, Event] = {}
    for event in timeline.events:
        stage, op, minibatch = event.action
        if op in (Op.F, Op.I, Op.B):
            found[Action(stage, Op.F if op is Op.F else Op.I, minibatch)] = event
    for minibatch in sorted({action.minibatch for action in found}):
        for producer, reader in timeline.edges:
            for op, source, target in ((Op.F, producer, reader), (Op.I, reader, producer)):
                made, read = found[Action(source, op, minibatch)], found[Action(target, op, minibatch)]
                if made.rank != read.rank:
                    yield made, read


# The format


def _process(name: str) -> Entry:
    return {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": name}}


def _track(rank: int, stages: Iterable[int]) -> Iterator[Entry]:
    """The name of one rank's track, and its place in the order of ranks."""
    name = f"rank {rank} (stage {', '.join(map(str, stages))})"
    for key, args in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": rank})):
        yield {"ph": "M", "name": key, "pid": 0, "tid": rank, "args": args}


def _slice(rank: int, action: Action, start: float, end: float, **details: Any) -> Entry:
    """One action on its rank's track; `details` are shown when it is selected."""
    category, colour = LOOK.get(action.op, (action.op.value, "grey"))
    return {
        "ph": "X", "name": str(action), "cat": category, "pid": 0, "tid": rank,
        "ts": _micro(start), "dur": _micro(end - start), "cname": colour,
        "args": {"stage": action.stage, "minibatch": action.minibatch, **details},
    }  # fmt: skip


def _arrow(number: int, source: int, left: float, target: int, arrived: float) -> Iterator[Entry]:
    """From a time on one rank to a time on another; each lies within the slice that it belongs to."""
    common = {"id": number, "name": "message", "cat": "message", "pid": 0}
    yield {"ph": "s", **common, "tid": source, "ts": _micro(left)}
    yield {"ph": "f", "bp": "e", **common, "tid": target, "ts": _micro(arrived)}


def _counter(name: str, time: float, **values: float) -> Entry:
    return {"ph": "C", "name": name, "pid": 0, "ts": _micro(time), "args": values}


def _micro(seconds: float) -> float:
    return round(1e6 * seconds, 3)
