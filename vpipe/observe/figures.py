"""The times, bytes and memory of a run's ranks, as figures, and the files that hold them while the run goes on.

A rank's time is computing, sending, waiting for messages, and the rest: time between actions. All four are read from
one clock, so that they add up to 100 %:
- on a CPU the host's: an action lasts as long as its call;
- on a GPU that of its stream: an action lasts from the end of the action before it, or from when the host began to
  issue it if that was later, to its end (`vpipe.runtime.recording`). A receive is waiting as a whole, other actions as
  far as the GPU was idle while the host waited. Computing includes pauses between the kernels of one action, and the
  time that another process takes on a shared GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from operator import add, sub
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from vpipe.communication.handler import ROOM
from vpipe.record.status import rank_figures, time_shares
from vpipe.system.device_memory import allocator_retries, peak_memory

if TYPE_CHECKING:
    from vpipe.pipeline import Pipeline


class RankFigures(NamedTuple):
    """One rank over some stretch of time: updates, seconds, bytes."""

    updates: float
    seconds: float
    """By the host's clock: for speeds."""
    clock: float
    """By the clock of the times that follow: for shares."""
    forward: float
    backward: float
    update: float
    send: float
    wait: float
    bytes_sent: float
    bytes_received: float
    retries: float
    """Times that a GPU's allocator had to release its cache (`allocator_retries`)."""
    peak_memory: float

    @property
    def compute(self) -> float:
        return self.forward + self.backward + self.update

    def speed(self, samples: int) -> dict[str, float]:
        """`samples` are those of an update."""
        return {
            "samples_per_s": samples * self.updates / self.seconds if self.seconds else 0.0,
            "seconds_per_update": self.seconds / self.updates if self.updates else 0.0,
        }

    @property
    def shares(self) -> dict[str, float]:
        return time_shares(self._asdict())

    def since(self, earlier: RankFigures) -> RankFigures:
        """The difference; the peak stays the whole run's."""
        return RankFigures(*map(sub, self, earlier))._replace(peak_memory=self.peak_memory)


def figures_of(pipe: Pipeline) -> RankFigures:
    """The figures of this rank since its start, a wait that is not over included."""
    runtime, handler = pipe.runtime, pipe.handler
    ways = (runtime.forward_stats, runtime.backward_stats, runtime.update_stats)
    now, clock = perf_counter(), runtime.recording.clock
    send, wait = sum(way.send for way in ways), runtime.waited
    if (waiting := handler.waiting) is not None:
        kind, *_, since = waiting
        if pipe.device.type == "cuda":
            since = max(since, clock)  # the GPU was busy until then
        so_far, clock = max(0.0, now - since), max(clock, now)
        send, wait = (send + so_far, wait) if kind == ROOM else (send, wait + so_far)
    return RankFigures(
        updates=pipe.updates,
        seconds=now,
        clock=clock,
        forward=runtime.forward_stats.compute,
        backward=runtime.backward_stats.compute,
        update=runtime.update_stats.compute,
        send=send,
        wait=wait,
        bytes_sent=handler.bytes_sent,
        bytes_received=handler.bytes_received,
        retries=allocator_retries(pipe.device),
        peak_memory=peak_memory(pipe.device),
    )


class Meter:
    """The figures of this rank over the stretches of a run in which it did nothing but train."""

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe = pipe
        now = figures_of(pipe)
        self._before = now.since(now)  # of the stretches that are over
        self._began: RankFigures | None = None

    def start(self) -> None:
        self._began = figures_of(self._pipe)

    def stop(self) -> None:
        self._before, self._began = self.total(), None

    @property
    def running(self) -> bool:
        return self._began is not None

    def total(self) -> RankFigures:
        now = figures_of(self._pipe)
        stretch = now.since(self._began or now)
        return RankFigures(*map(add, self._before, stretch))._replace(peak_memory=now.peak_memory)


def shares(ranks: Sequence[RankFigures]) -> dict[str, float]:
    """Shares of all ranks' time: computing (`of_limit`), sending and waiting.

    The limit is every rank computing its part with no communication and no waiting.
    """
    found = RankFigures(*map(sum, zip(*ranks, strict=True))).shares
    return {"of_limit": found.pop("compute_share"), **found}


def stage_figures(ranks: Sequence[RankFigures], placement: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """For each rank its stages and its figures, for the logs and the summary."""
    return [
        {
            **rank_figures(
                rank, [stage for stage, holders in enumerate(placement) if rank in holders], figures._asdict()
            ),
            "peak_memory": int(figures.peak_memory),
            "allocator_retries": int(figures.retries),
        }
        for rank, figures in enumerate(ranks)
    ]


class MetricsWriter:
    """`metrics.jsonl`, one line for each report (kind, update, figures), and scalars for TensorBoard if installed."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / "metrics.jsonl").open("a", encoding="utf-8", buffering=1)
        self._board: Any = None
        with suppress(ImportError):
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"))

    def write(self, kind: str, update: int, **figures: Any) -> None:
        self._file.write(json.dumps({"kind": kind, "update": update, **figures}) + "\n")
        if self._board is not None:
            for name, value in scalars(kind, figures):
                self._board.add_scalar(name, value, update)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def scalars(kind: str, figures: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers under TensorBoard's names: `train/loss`; those of each rank as `rank 1, stage 1/bubble_share`."""
    named = [(kind, figures)]
    for rank in figures.get("ranks", ()):
        place = f"rank {rank['rank']}, stage {', '.join(map(str, rank['stages']))}"
        named.append((place, {name: value for name, value in rank.items() if name != "rank"}))
    for place, values in named:
        yield from ((f"{place}/{k}", v) for k, v in values.items() if isinstance(v, int | float))
