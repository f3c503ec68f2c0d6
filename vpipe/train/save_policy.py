"""The save policy of a run: when it saves, which checkpoints it keeps, from which it resumes, failed saves."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from vpipe import checkpoint
from vpipe.config import RunConfig
from vpipe.errors import NotWrittenError, PeerError, VPipeError
from vpipe.pipeline import Pipeline
from vpipe.record.run_folder import newest_runs
from vpipe.system.files import is_file, is_folder
from vpipe.system.ownership import is_ours

BEST = "best_evaluation_loss"


class SavePolicy:
    """Every rank has one and asks it after every update; all decide alike."""

    def __init__(self, pipe: Pipeline, folder: Path, config: RunConfig, say: Callable[[str], None]) -> None:
        self._pipe = pipe
        self._interval = config.checkpoint_interval
        self._seconds = 60 * (config.checkpoint_minutes or math.inf)
        self._gives_up = config.on_save_error == "stop"
        self._saver = checkpoint.Saver(
            pipe,
            folder / "checkpoints",
            keep=config.keep_checkpoints,
            report=say,
            failed=pipe.request_stop if self._gives_up else lambda: None,
        )
        self._saved = pipe.updates
        self._saved_at = time.monotonic()
        self._evaluated = (-1, math.inf)  # updates, loss
        self._best = math.inf
        self._better = False  # whether the best is still to be saved
        self._remove_hook: Callable[[], None] = lambda: None
        if pipe.rank == pipe.schedule.placement[-1][0] and self._seconds < math.inf:
            self._remove_hook = pipe.on_update(self._watch_clock)

    def evaluated(self, loss: float) -> None:
        """The weights as they are now have this evaluation loss."""
        self._evaluated = (self._pipe.updates, loss)
        if loss < self._best:
            self._best, self._better = loss, True

    def due(self, done: int) -> bool:
        """Whether to save after this many updates."""
        regular = self._interval and done % self._interval == 0
        # Where checkpoints are saved regularly, the best is saved too.
        best = self._better and (self._interval or self._seconds < math.inf)
        return not self.up_to_date and bool(regular or best or self._pipe.save_requested)

    @property
    def up_to_date(self) -> bool:
        """Whether the newest checkpoint has every update."""
        return self._pipe.updates == self._saved

    def check(self) -> None:
        """Raise what went wrong with the latest save, if the run ends for it."""
        self._saver.wait()
        if self._gives_up and self._saver.failed:
            self.finish()

    def _watch_clock(self, update: int, loss: float) -> None:
        """On a rank that computes the loss, with which the request travels."""
        if time.monotonic() >= self._saved_at + self._seconds:
            self._saved_at = time.monotonic()
            self._pipe.request_save()

    def save(self, position: Callable[[], dict[str, Any]]) -> None:
        """Begin a save; an asynchronous pipeline is drained for it, then `position` is asked for."""
        self.check()
        pipe = self._pipe
        pipe.flush()
        updates, loss = self._evaluated
        values = {checkpoint.EVALUATION: loss if updates == pipe.updates else math.inf, BEST: self._best}
        finite = {key: value for key, value in values.items() if math.isfinite(value)}
        self._saver.start(position() | finite)
        self._saved, self._better = pipe.updates, False
        self._saved_at = time.monotonic()

    def resume(self, extra: dict[str, Any]) -> None:
        """Continue with the values of an earlier run's checkpoint."""
        self._best = extra.get(BEST, math.inf)
        self._saved = self._pipe.updates

    def finish(self) -> Path:
        """The last checkpoint, once it is whole."""
        try:
            path = self._saver.finish()
        except NotWrittenError as error:
            raise NotWrittenError(f"{error}; those that were saved before are whole") from None
        assert path is not None
        return path

    def __enter__(self) -> SavePolicy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """What is being written is finished, whatever ends the run, but for a peer that is gone."""
        self._remove_hook()
        if not isinstance(error, PeerError):
            self._saver.wait()


def find_checkpoint(wanted: str, log_directory: Path, report: Callable[[str], None]) -> Path | None:
    """`auto` is the newest good one of any run of this user, if there is one; else a checkpoint's or a run's folder.

    `report` is called with each that is skipped, and why.
    """
    if wanted == "auto":
        for run in newest_runs(log_directory):
            if not is_ours(run / "config.yml"):
                report(f"{run} is skipped: it belongs to another user; name it to resume from it")
            elif (good := checkpoint.newest(run / "checkpoints", report)) is not None:
                return good
        return None
    path = Path(wanted)
    if is_file(path / "manifest.json"):
        return path
    if (
        is_folder(path / "checkpoints")
        and (good := checkpoint.newest(path / "checkpoints", report)) is not None
    ):
        return good
    raise VPipeError(
        f"--resume is {wanted!r}: there is no good checkpoint: give `auto`, the folder of a run, "
        "or one of its checkpoints/step-..."
    )
