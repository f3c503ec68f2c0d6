"""The results of a run in its folder: summary.json, trace.json, report.html, however it ended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from vpipe.errors import NotWrittenError, VPipeError
from vpipe.observe.report import write_report
from vpipe.observe.trace import write_trace
from vpipe.record.run_folder import read_object
from vpipe.record.status import read_statuses
from vpipe.system.best_effort import BestEffort
from vpipe.system.files import write_json

SUMMARY, REPORT = "summary.json", "report.html"


def write_results(folder: Path, summary: dict[str, Any]) -> None:
    """Raises if the summary cannot be written; trace and report are made of what else is in the folder."""
    lost: NotWrittenError | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)  # somebody may have deleted it
        write_json(folder / SUMMARY, summary)
    except OSError as error:
        lost = NotWrittenError(f"{folder / SUMMARY}: cannot be written: {error.strerror or error}")
    except NotWrittenError as error:
        lost = error
    effort = BestEffort()
    _attempt(effort, lambda: write_trace(folder))
    _attempt(effort, lambda: write_report([folder], folder / REPORT))
    if lost is not None:
        raise lost


def rewrite_results(folder: Path) -> None:
    """Trace and report once more, when files of other ranks have come."""
    if summary := read_object(folder / SUMMARY):
        _attempt(BestEffort(), lambda: write_results(folder, summary))


def write_interrupted_results(folder: Path, ended: str, error: str) -> None:
    """The results of a run whose ranks could not write them: the last that they said while they ran.

    Nothing is written for a run that has written its own, or that ended before it trained.
    """
    if not (folder / SUMMARY).exists():
        replace_results(folder, ended, error)


def replace_results(folder: Path, ended: str, error: str) -> None:
    """The same, in place of the results of another run that has used the folder before."""
    statuses = read_statuses(folder)
    if not statuses:
        return
    summary = {
        "ended": ended,
        "error": error,
        "updates": max(status.updates for status in statuses),
        "loss": statuses[0].loss,
        "report": str(folder / REPORT),
    }
    _attempt(BestEffort(), lambda: write_results(folder, summary))


def _attempt(effort: BestEffort, write: Callable[[], object]) -> None:
    """For files that can be made again: a run is not to fail because of one that is missing or damaged."""
    try:
        with effort.writing("the results"):
            write()
    except VPipeError as error:
        effort.lost(str(error))
