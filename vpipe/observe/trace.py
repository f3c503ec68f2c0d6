"""The trace of a real run, for Perfetto and chrome://tracing: `trace.json` from the events of its ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from vpipe.errors import ConfigError
from vpipe.observe.chrome import Entry, arrow, counter, piece, process, track, write_entries
from vpipe.observe.counted import counted_memory
from vpipe.observe.counts import counts
from vpipe.record.events import RankEvents, Recorded, read_events
from vpipe.schedule import Action, Op

MESSAGES = ((Op.SEND_F, Op.RECV_F), (Op.SEND_B, Op.RECV_B))


ACTIONS = 50_000
"""Of all ranks together; of a longer run the end is traced. Viewers get slow with more."""


def write_trace(folder: Path) -> Path:
    """Write `trace.json` beside the events of a run."""
    ranks = read_events(folder)
    if not ranks:
        raise ConfigError(f"{folder}: holds no events.<rank>.json: there is nothing to trace")
    path = folder / "trace.json"
    write_entries(trace_entries(newest(ranks, ACTIONS)), path)
    return path


def trace_entries(ranks: Sequence[RankEvents]) -> Iterator[Entry]:
    """One track a rank, arrows from send to receive, counters for each stage. The first action starts at 0."""
    began = origin(ranks)
    yield process("measured")
    for events in ranks:
        stages = stages_of(events)
        yield from track(events.rank, stages)
        for entry in events.actions:
            yield _slice(events.rank, entry, began)
        for time, held in counted_memory(events):
            yield counter(f"memory by count, rank {events.rank}", time - began, bytes=held)
        for time, held in events.memory:
            if time >= began:
                yield counter(
                    f"memory of the {events.memory_of}, rank {events.rank}", time - began, bytes=held
                )
        for stage in stages:
            for time, in_flight, versions in counts(events.actions, stage):
                place = f"stage {stage} on rank {events.rank}"
                yield counter(f"minibatches in flight, {place}", time - began, minibatches=in_flight)
                yield counter(f"weight versions, {place}", time - began, versions=versions)
    for number, (source, sent, target, received) in enumerate(messages(ranks)):
        yield from arrow(number, source, sent.start - began, target, received.end - began)


def messages(ranks: Sequence[RankEvents]) -> Iterator[tuple[int, Recorded, int, Recorded]]:
    """Each send with its receive, as (rank, send, rank, receive), as far as both are in the record."""
    found: dict[Action, tuple[int, Recorded]] = {
        entry.action: (events.rank, entry)
        for events in ranks
        for entry in events.actions
        if not entry.evaluation
    }
    edges = sorted({edge for events in ranks for edge in events.edges})
    for (stage, op, minibatch), (rank, sent) in found.items():
        for send, receive in MESSAGES:
            if op is not send:
                continue
            for producer, reader in edges:
                source, target = (producer, reader) if op is Op.SEND_F else (reader, producer)
                there = found.get(Action(target, receive, minibatch))
                if source == stage and there is not None and there[0] != rank:
                    yield rank, sent, *there


def newest(ranks: Sequence[RankEvents], most: int) -> list[RankEvents]:
    """The actions from the time on at which every rank's record has begun, and of those the last ones."""
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


def _slice(rank: int, entry: Recorded, began: float) -> Entry:
    args: dict[str, float | str] = {}
    for key, value in (("sent", entry.sent), ("received", entry.received)):
        if value:
            args[f"bytes {key}"] = value
    if entry.wait:
        args["waited ms"] = round(1000 * entry.wait, 4)
    if entry.version >= 0:
        args["weight version"] = entry.version
    if entry.evaluation:
        args["of"] = "an evaluation"
    return piece(rank, entry.action, entry.start - began, entry.end - began, **args)
