"""The status of a rank: `status.<rank>.json` in the run's folder, rewritten each second.

`vpipe top`, `vpipe diagnose`, the Prometheus endpoint and the other ranks' watches read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from vpipe.system.files import json_text, replace_text

RUNNING, ENDED, STOPPED, FAILED = "running", "ended", "stopped by you", "failed"
TIMES = ("forward", "backward", "update", "send", "wait")
"""Kinds of time of a rank; the rest of its seconds lies between actions."""


@dataclass(frozen=True)
class Waiting:
    what: str
    """The name of the action that waits (1RECV_F7), else of the meeting or the tensor."""
    peer: int
    """The rank that must send it; negative: all ranks that are missing."""
    seconds: float
    room: bool = False
    """Whether it waits to send: the peer has not taken the messages before it."""


@dataclass(frozen=True)
class StageDrift:
    """What old weights do to the gradients of a stage, on average (`vpipe.observe.drift`)."""

    stage: int
    delay: int
    """Updates that its gradients are old at most."""
    drift: float
    """Between the weights that a gradient is of and those that it is applied to, relative to the weights."""
    unseen: float
    """Cosine between an update and the next gradient, which is of weights without it."""
    seen: float
    """The same of the first gradient that is of weights with it."""
    samples: int
    optimizer: str
    predicted: bool
    factor: float = 1.0
    """Samples to equal loss that such a run is known to need, as a multiple of those of a synchronous one."""

    @property
    def overshoot(self) -> float:
        """The share of an update that is repeated only because gradients have not seen it."""
        return self.unseen - max(0.0, self.seen)


@dataclass(frozen=True)
class Status:
    rank: int
    stages: tuple[int, ...]
    process: int
    host: str
    time: float
    """`time.time()` when it was written."""
    monotonic: float | None = None
    """`time.monotonic()` then, for how long ago that was: the time of day may be set. Processes of a host share it."""
    state: str = RUNNING
    error: str = ""
    updates: int = 0
    total: int = 0
    loss: float | None = None
    samples_per_s: float = 0.0
    tokens_per_s: float | None = None
    mfu: float | None = None
    """Share of the cards' peak; None where that is not known."""
    place: str = ""
    """The action that the rank runs or, if `inside` is false, has just run; else words for what it does."""
    inside: bool = False
    seconds: float = 0.0
    """Time since it began or, if `inside` is false, ended."""
    offset: int = 0
    """The minibatch that the rank's program counts from."""
    waiting: Waiting | None = None
    times: dict[str, float] = field(default_factory=dict)
    """TIMES and `all`, of the last few seconds."""
    totals: dict[str, float] = field(default_factory=dict)
    """TIMES and more figures since the training began, without filling the pipeline, evaluations and checkpoints."""
    memory: int = 0
    peak_memory: int = 0
    in_flight: tuple[int, ...] = ()
    versions: tuple[int, ...] = ()
    """For each stage: minibatches between F and backward, and versions of the weights."""
    stale: tuple[StageDrift, ...] = ()
    """Of stages whose gradients are old."""
    lost_writes: int = 0
    """Writes beside the training that failed, such as lines of a log on a full disk."""


def stage_lines(statuses: Iterable[Status]) -> list[dict[str, Any]]:
    """For each rank its figures since the training began, at most a second old."""
    return [
        {
            **rank_figures(status.rank, status.stages, status.totals),
            "samples_per_s": status.samples_per_s,
            "seconds_per_update": status.totals["seconds"] / (status.totals["updates"] or 1.0),
            "memory": status.memory,
        }
        for status in statuses
        if status.totals.get("seconds")
    ]


def rank_figures(rank: int, stages: Iterable[int], totals: Mapping[str, float]) -> dict[str, Any]:
    """Times, bytes and shares of one rank, for the logs and the summary."""
    return {
        "rank": rank,
        "stages": list(stages),
        **{f"{name}_s": totals[name] for name in TIMES},
        **{name: int(totals[name]) for name in ("bytes_sent", "bytes_received")},
        **time_shares(totals),
    }


def time_shares(totals: Mapping[str, float]) -> dict[str, float]:
    """Computing, sending (communication) and waiting (bubble) as shares of the seconds of the same clock."""
    computed = totals["forward"] + totals["backward"] + totals["update"]
    total = max(totals["clock"], computed + totals["send"] + totals["wait"]) or 1.0
    return {
        "compute_share": computed / total,
        "communication_share": totals["send"] / total,
        "bubble_share": totals["wait"] / total,
    }


def status_path(folder: Path, rank: int) -> Path:
    return folder / f"status.{rank}.json"


def write_status(status: Status, folder: Path) -> None:
    replace_text(status_path(folder, status.rank), json_text(asdict(status)))


def read_statuses(folder: Path) -> list[Status]:
    """Of all ranks that wrote one, in order of rank; a file that is not a status is skipped."""
    found = [read_status(path) for path in folder.glob("status.*.json")]
    return sorted((status for status in found if status is not None), key=lambda status: status.rank)


def read_status(path: Path) -> Status | None:
    try:
        return _STATUS.validate_json(path.read_bytes())
    except (OSError, ValueError):
        return None


_STATUS = TypeAdapter(Status)
