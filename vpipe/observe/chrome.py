"""The Chrome trace format, as far as a pipeline needs it: tracks, slices, arrows, counters.

Files open in Perfetto and in chrome://tracing. Times come in seconds; the files have microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from vpipe.errors import ConfigError
from vpipe.schedule import Action, Op

Entry = dict[str, Any]

COLOURS = {
    Op.F: "thread_state_running",
    Op.B: "rail_animation",
    Op.I: "rail_animation",
    Op.W: "rail_load",
    Op.STEP: "startup",
    Op.REDUCE: "rail_idle",
}
"""Names of colours that the viewers know; anything else (messages) is grey."""
NAMES = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "input gradient",
    Op.W: "weight gradient",
    Op.STEP: "update",
}


def write_entries(entries: Iterable[Entry], path: Path) -> None:
    """Entries are written one by one: a trace may be larger than memory would like."""
    try:
        with path.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            for number, entry in enumerate(entries):
                file.write((",\n" if number else "") + json.dumps(entry, separators=(",", ":")))
            file.write("\n]}\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from None


def process(name: str) -> Entry:
    return {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": name}}


def track(rank: int, stages: Iterable[int]) -> Iterator[Entry]:
    """The line of one rank, in the order of ranks."""
    name = f"rank {rank} (stage {', '.join(map(str, stages))})"
    for key, args in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": rank})):
        yield {"ph": "M", "name": key, "pid": 0, "tid": rank, "args": args}


def piece(rank: int, action: Action, start: float, end: float, **args: Any) -> Entry:
    """One action on its rank's track; `args` are shown when it is chosen."""
    return {
        "ph": "X",
        "name": str(action),
        "cat": NAMES.get(action.op, action.op.value),
        "pid": 0,
        "tid": rank,
        "ts": _micro(start),
        "dur": _micro(end - start),
        "cname": COLOURS.get(action.op, "grey"),
        "args": {"stage": action.stage, "minibatch": action.minibatch, **args},
    }


def arrow(number: int, source: int, left: float, target: int, arrived: float) -> Iterator[Entry]:
    """From a time on one rank to a time on another; each lies within the slice that it belongs to."""
    common = {"id": number, "name": "message", "cat": "message", "pid": 0}
    yield {"ph": "s", **common, "tid": source, "ts": _micro(left)}
    yield {"ph": "f", "bp": "e", **common, "tid": target, "ts": _micro(arrived)}


def counter(name: str, time: float, **values: float) -> Entry:
    return {"ph": "C", "name": name, "pid": 0, "ts": _micro(time), "args": values}


def _micro(seconds: float) -> float:
    return round(1e6 * seconds, 3)
