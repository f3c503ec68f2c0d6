"""The record of a run that a script makes: the files that `vpipe train` writes, by the same recorder."""

from __future__ import annotations

from collections.abc import Callable, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vpipe.communication import agree
from vpipe.cost import write_plan
from vpipe.errors import VPipeError
from vpipe.observe.description import plan_of, write_stages
from vpipe.observe.pace import Pace
from vpipe.observe.recorder import Recorder
from vpipe.observe.results import replace_results, write_results
from vpipe.record.run_folder import COMPLETE, FAILED, STAGES, STOPPED
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
            phases=pipe.phases,
        )
        if pipe.rank == 0:
            self._describe(given, samples)
        self._pace = Pace(pipe, self.recorder.say)

    def begin_pass(self, batches: Any) -> Callable[[], None]:
        """A pass over some batches begins; returns what ends it."""
        pipe, epoch = self._pipe, self._passes
        self._passes += 1
        if epoch == 0:
            pipe.phases.begin("first update")
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
        """Write the events and, if the run has trained or evaluated, its summary, trace and report."""
        recorder, pipe = self.recorder, self._pipe
        worked = bool(recorder.losses or recorder.evaluations)
        summary = None
        recorder.error = error
        try:
            recorder.write_events()  # before the ranks meet for the summary: then rank 0 reads everybody's
            if worked and error is None:
                summary = recorder.summary(STOPPED if pipe.stop_requested else COMPLETE)
        finally:
            recorder.close()
        if pipe.rank or not worked:
            return
        if summary is not None:
            write_results(self._folder, summary)
        else:
            replace_results(self._folder, FAILED, _first_line(error))

    def _describe(self, given: Given, samples: int) -> None:
        """Write the stages and the plan."""
        pipe, folder, options, effort = self._pipe, self._folder, given.layout, self.recorder.effort
        with effort.writing(folder / STAGES):
            write_stages(pipe.layout, folder, cap=None)
        plan = plan_of(pipe, replicas=options.replicas, chunks=options.chunks, batch_size=samples)
        with effort.writing(folder / "plan.json"):
            write_plan(plan, folder / "plan.json")

    def _make_folder(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise VPipeError(
                f"run_dir is {str(self._folder)!r}: it cannot be made ({error.strerror}): give a folder that you may "
                "write to"
            ) from None


def _first_line(error: BaseException | None) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
