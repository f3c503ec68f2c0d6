"""The timeline as a Chrome trace: open it in Perfetto or chrome://tracing.

One track a rank, an arrow for each message from the action that made it to the one that reads it, and each rank's
memory as a counter. Times are microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vpipe.errors import ConfigError
from vpipe.schedule import Action, Event, Op
from vpipe.simulate.simulation import Simulation, Timeline

COLOURS = {
    Op.F: "thread_state_running",
    Op.B: "rail_animation",
    Op.I: "rail_animation",
    Op.W: "rail_load",
    Op.STEP: "startup",
    Op.REDUCE: "rail_idle",
}
NAMES = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "input gradient",
    Op.W: "weight gradient",
    Op.STEP: "update",
}


def write_trace(simulation: Simulation, path: Path) -> None:
    """Events are written one by one: a trace may be larger than memory would like."""
    try:
        with path.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            for number, entry in enumerate(trace_events(simulation)):
                file.write((",\n" if number else "") + json.dumps(entry))
            file.write("\n]}\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from None


def trace_events(simulation: Simulation) -> Iterator[dict[str, Any]]:
    assert simulation.timeline is not None, "simulate with timeline=True"
    yield {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": f"simulated {simulation.schedule}"}}
    for rank in simulation.ranks:
        stages = ", ".join(map(str, rank.stages))
        name = f"rank {rank.rank} (stage {stages})"
        yield {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank.rank, "args": {"name": name}}
        yield {
            "ph": "M",
            "name": "thread_sort_index",
            "pid": 0,
            "tid": rank.rank,
            "args": {"sort_index": rank.rank},
        }
    yield from (_slice(event) for event in simulation.timeline.events)
    yield from _arrows(simulation.timeline)
    for rank, samples in zip(simulation.ranks, simulation.timeline.memory, strict=True):
        fixed = rank.memory.total - rank.memory.activations - rank.memory.versions
        for time, held in ((0.0, 0), *samples):
            yield {
                "ph": "C",
                "name": f"memory of rank {rank.rank}",
                "pid": 0,
                "ts": time * 1e6,
                "args": {"bytes": fixed + held},
            }


def _slice(event: Event) -> dict[str, Any]:
    rank, action, start, end = event
    return {
        "ph": "X",
        "name": str(action),
        "cat": NAMES.get(action.op, action.op.value),
        "pid": 0,
        "tid": rank,
        "ts": start * 1e6,
        "dur": (end - start) * 1e6,
        "cname": COLOURS[action.op],
        "args": {"stage": action.stage, "minibatch": action.minibatch},
    }


def _arrows(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """From F to the F of each reader, and from I or B to that of each producer, where those sit on other ranks."""
    found: dict[Action, Event] = {}
    minibatches = set()
    for event in timeline.events:
        stage, op, minibatch = event.action
        if op in (Op.F, Op.I, Op.B):
            found[Action(stage, Op.F if op is Op.F else Op.I, minibatch)] = event
            minibatches.add(minibatch)
    number = 0
    for minibatch in sorted(minibatches):
        for producer, reader in timeline.edges:
            for op, source, target in ((Op.F, producer, reader), (Op.I, reader, producer)):
                made, read = found[Action(source, op, minibatch)], found[Action(target, op, minibatch)]
                if made.rank != read.rank:
                    yield _arrow("s", number, made.rank, made.end)
                    yield _arrow("f", number, read.rank, read.start)
                    number += 1


def _arrow(phase: str, number: int, rank: int, time: float) -> dict[str, Any]:
    end = {"bp": "e"} if phase == "f" else {}
    entry = {"ph": phase, "id": number, "name": "message", "cat": "message", "pid": 0, "tid": rank}
    return entry | {"ts": time * 1e6} | end
