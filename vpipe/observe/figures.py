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

import os
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from io import BytesIO
from operator import add, sub
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from vpipe.communication.handler import ROOM
from vpipe.record.status import rank_figures, time_shares
from vpipe.system.best_effort import BestEffort, LogFile
from vpipe.system.device_memory import allocator_retries, peak_memory
from vpipe.system.files import json_text

if TYPE_CHECKING:
    from vpipe.observe.trackers import Tracker
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
    """`metrics.jsonl`, one line for each report (kind, update, figures), and scalars for TensorBoard if installed.

    Trackers are sent the same scalars.
    """

    def __init__(self, folder: Path, effort: BestEffort, trackers: Sequence[Tracker] = ()) -> None:
        self._trackers = trackers
        self._file = LogFile(folder / "metrics.jsonl", effort)
        self._board: TensorBoardFile | None = None
        with suppress(ImportError):
            self._board = TensorBoardFile(folder / "tensorboard", effort)

    def write(self, kind: str, update: int, **figures: Any) -> None:
        self._file.line(json_text({"kind": kind, "update": update, **figures}))
        if self._board is not None:
            self._board.write(update, scalars(kind, figures))
        for tracker in self._trackers:
            tracker.write(update, scalars(kind, figures))

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()
        for tracker in self._trackers:
            tracker.close()


class TensorBoardFile:
    """Scalars in TensorBoard's format.

    Its own writer is a thread that ends, with a traceback, at the first write that fails.
    """

    def __init__(self, folder: Path, effort: BestEffort) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary, self._record_writer = Event, Summary, RecordWriter
        self._began = time.time() - perf_counter()
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._file = LogFile(folder / name, effort)
        with effort.writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._append(self._event(wall_time=self._now(), file_version="brain.Event:2"))

    def write(self, update: int, named: Iterable[tuple[str, float]]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in named]
        self._append(self._event(wall_time=self._now(), step=update, summary=self._summary(value=values)))

    def close(self) -> None:
        self._file.close()

    def _now(self) -> float:
        """The clock may be set while the run goes on, and is not followed."""
        return self._began + perf_counter()

    def _append(self, event: Any) -> None:
        record = BytesIO()
        self._record_writer(record).write(event.SerializeToString())
        self._file.append(record.getvalue())


def scalars(kind: str, figures: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers under TensorBoard's names: `train/loss`; those of each rank as `rank 1, stage 1/bubble_share`."""
    named = [(kind, figures)]
    for rank in figures.get("ranks", ()):
        place = f"rank {rank['rank']}, stage {', '.join(map(str, rank['stages']))}"
        named.append((place, {name: value for name, value in rank.items() if name != "rank"}))
    for place, values in named:
        yield from ((f"{place}/{k}", v) for k, v in values.items() if isinstance(v, int | float))
