"""The checkpoint that `--resume` means."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vpipe.checkpoint import newest
from vpipe.errors import VPipeError
from vpipe.observe.folder import newest_runs


def find_checkpoint(wanted: str, log_directory: Path, report: Callable[[str], None]) -> Path | None:
    """`auto` is the newest good one of any run, if there is one; else a checkpoint's or a run's folder.

    `report` is told of each that is passed over, and why.
    """
    if wanted == "auto":
        found = (newest(run / "checkpoints", report) for run in newest_runs(log_directory))
        return next((path for path in found if path is not None), None)
    path = Path(wanted)
    if (path / "manifest.json").is_file():
        return path
    if (path / "checkpoints").is_dir() and (good := newest(path / "checkpoints", report)) is not None:
        return good
    raise VPipeError(
        f"--resume is {wanted!r}: there is no good checkpoint: give `auto`, the folder of a run, "
        "or one of its checkpoints/step-..."
    )
