"""The record of a run that a script makes: the files that `vpipe train` writes, by the same recorder."""

from __future__ import annotations

from collections.abc import Callable, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vpipe.communication import agree
from vpipe.cost import write_plan
from vpipe.errors import VPipeError
from vpipe.observe.description import plan_of, write_outcome, write_stages
from vpipe.observe.pace import Pace
from vpipe.observe.recorder import Recorder
from vpipe.runtime import count_samples

if TYPE_CHECKING:
    from vpipe.pipeline import Pipeline
    from vpipe.pipeline.pipeline import Given

PRINT_FREQUENCY = 10
"""Updates between two lines of the log and of the metrics."""
HANG_LIMIT = 60.0
"""Seconds that a rank may wait for another before every rank logs what it does."""


class RunRecord:
    """Every rank has one and calls the same methods."""

    def __init__(self, pipe: Pipeline, folder: Path, given: Given) -> None:
        self._pipe, self._folder = pipe, folder
        self._passes = 0
        agree(pipe.world, "run_dir", self._make_folder)
        pipe.runtime.align_clocks()
        samples = int(count_samples(pipe.layout.normalise(given.example_batch)))
        if pipe.rank == 0:
            options = given.layout
            write_stages(pipe.layout, folder, cap=None)
            plan = plan_of(pipe, replicas=options.replicas, chunks=options.chunks, batch_size=samples)
            write_plan(plan, folder / "plan.json")
        self.recorder = Recorder(
            pipe,
            folder,
            total=0,
            samples=samples * pipe.schedule.update_interval,
            tokens=None,
            print_frequency=PRINT_FREQUENCY,
            verbose_frequency=0,
            hang_limit=HANG_LIMIT,
            prometheus_port=0,
            shows_progress=False,
        )
        self._pace = Pace(pipe, self.recorder.say)

    def begin_pass(self, batches: Any) -> Callable[[], None]:
        """A pass over some batches begins; returns what ends it."""
        pipe, epoch = self._pipe, self._passes
        self._passes += 1
        more = -(-len(batches) // pipe.schedule.update_interval) if isinstance(batches, Sized) else 0
        self.recorder.expect(pipe.updates + more if more else 0)

        def record(update: int, loss: float) -> None:
            self.recorder.update(update, loss, epoch)
            self._pace.update()

        remove = pipe.on_update(record)

        def end() -> None:
            remove()
            self.recorder.pause()

        return end

    def close(self, error: BaseException | None) -> None:
        """Write events, and unless the run has failed, its summary, trace and report."""
        recorder = self.recorder
        whole = error is None and bool(recorder.losses or recorder.evaluations)
        summary = None
        try:
            if whole:
                summary = recorder.summary()
        finally:
            recorder.error = error
            recorder.write_events(self._folder)
            recorder.close()
        if summary is not None:
            self._pipe.world.all_gather("events", None)  # rank 0 reads everybody's
            if self._pipe.rank == 0:
                write_outcome(self._folder, summary)

    def _make_folder(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise VPipeError(
                f"run_dir is {str(self._folder)!r}: it cannot be made ({error.strerror}): give a folder that you may "
                "write to"
            ) from None
