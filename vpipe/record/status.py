"""What a rank is doing, as a small file that is written anew each second: `status.<rank>.json` in the run's folder.

`vpipe top`, `vpipe diagnose`, the Prometheus endpoint and the other ranks' watches read it. It is written beside and
renamed, so that nobody reads half of one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

RUNNING, ENDED, FAILED = "running", "ended", "failed"


@dataclass(frozen=True)
class Waiting:
    """What a rank waits for."""

    what: str
    """The action's name where an action waits (1RECV_F7), else the meeting's or the tensor's."""
    peer: int
    """The rank that has to bring it; negative: whoever is missing."""
    seconds: float
    room: bool = False
    """Whether it waits to send: the peer has not taken what was sent before."""


@dataclass(frozen=True)
class Status:
    rank: int
    stages: tuple[int, ...]
    process: int
    host: str
    time: float
    """Of the clock on the wall, when it was written."""
    state: str = RUNNING
    error: str = ""
    updates: int = 0
    total: int = 0
    loss: float | None = None
    samples_per_s: float = 0.0
    place: str = ""
    """The action that the rank is in or, if `inside` is false, behind which it is; else in words what it does."""
    inside: bool = False
    seconds: float = 0.0
    """How long it has been there."""
    offset: int = 0
    """The minibatch that the rank's program counts from."""
    waiting: Waiting | None = None
    times: dict[str, float] = field(default_factory=dict)
    """Seconds of forward, backward, update, send and wait, and `all`, in the last few seconds."""
    totals: dict[str, float] = field(default_factory=dict)
    """The same since the training began, without filling the pipeline, evaluations and checkpoints."""
    memory: int = 0
    peak_memory: int = 0
    in_flight: tuple[int, ...] = ()
    versions: tuple[int, ...] = ()
    """For each stage: minibatches between F and backward, and versions of the weights."""


def stage_lines(statuses: Iterable[Status]) -> list[dict[str, Any]]:
    """For each rank where its time went since the training began, as each last told it: at most a second ago."""
    lines = []
    for status in statuses:
        totals = status.totals
        seconds = totals.get("seconds", 0.0)
        if not seconds:
            continue
        computed = totals["forward"] + totals["backward"] + totals["update"]
        lines.append(
            {
                "rank": status.rank,
                "stages": list(status.stages),
                **{f"{name}_s": totals[name] for name in ("forward", "backward", "update", "send", "wait")},
                "bytes_sent": int(totals["bytes_sent"]),
                "bytes_received": int(totals["bytes_received"]),
                "samples_per_s": status.samples_per_s,
                "seconds_per_update": seconds / totals["updates"] if totals["updates"] else 0.0,
                "compute_share": computed / seconds,
                "communication_share": totals["send"] / seconds,
                "bubble_share": totals["wait"] / seconds,
                "memory": status.memory,
            }
        )
    return lines


def write_status(status: Status, folder: Path) -> None:
    path = folder / f"status.{status.rank}.json"
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(asdict(status)), encoding="utf-8")
    os.replace(beside, path)


def read_statuses(folder: Path) -> list[Status]:
    """Of all ranks that wrote one, in order of rank; a file that makes no sense is passed over."""
    found = [read_status(path) for path in folder.glob("status.*.json")]
    return sorted((status for status in found if status is not None), key=lambda status: status.rank)


def read_status(path: Path) -> Status | None:
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        known = {entry.name for entry in fields(Status)}
        values = {key: value for key, value in values.items() if key in known}
        if values.get("waiting") is not None:
            values["waiting"] = Waiting(**values["waiting"])
        for key in ("stages", "in_flight", "versions"):
            values[key] = tuple(values.get(key, ()))
        return Status(**values)
    except (OSError, ValueError, TypeError):
        return None
