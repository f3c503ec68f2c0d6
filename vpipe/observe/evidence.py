"""The files of a run, read once for all checks of `vpipe diagnose`, and the findings that the checks return."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vpipe.observe.hang import RankState, rank_states
from vpipe.observe.prediction import RunCosts, run_costs
from vpipe.record.events import RankEvents, read_events
from vpipe.record.run_folder import (
    COMPLETE,
    StageFacts,
    check_run_folder,
    log_path,
    read_metrics,
    read_object,
    read_stages,
)
from vpipe.system.files import read_tail

FAULT, NOTICE, FINE, UNKNOWN = "fault", "notice", "fine", "unknown"


@dataclass(frozen=True)
class Finding:
    topic: str
    grade: str
    """FAULT: this is wrong. NOTICE: it could be better. FINE. UNKNOWN: the run's files lack something."""
    text: str
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Evidence:
    folder: Path
    ranks: list[RankEvents]
    states: list[RankState]
    """What each rank does, or did last."""
    stages: StageFacts | None
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    costs: RunCosts | None

    def log(self, rank: int) -> str:
        """The end of a rank's log."""
        return read_tail(log_path(self.folder, rank))

    @property
    def ended(self) -> str | None:
        """How the run has ended, in the words of its summary; None if it has not, or was killed."""
        return self.summary.get("ended", COMPLETE) if self.summary else None


def read_evidence(folder: Path) -> Evidence:
    check_run_folder(folder)
    ranks = read_events(folder)
    return Evidence(
        folder,
        ranks,
        rank_states(folder),
        read_stages(folder),
        read_object(folder / "summary.json"),
        read_metrics(folder),
        run_costs(folder, ranks),
    )
