"""What a run has left behind, read once for all who look at it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vpipe.errors import ConfigError
from vpipe.observe.hang import RankState, findings
from vpipe.observe.medians import Medians, medians
from vpipe.observe.prediction import RunCosts, run_costs
from vpipe.record.events import RankEvents, read_events
from vpipe.record.run_files import read_metrics, read_object
from vpipe.record.stages import StageFacts, read_stages


@dataclass(frozen=True)
class Evidence:
    folder: Path
    ranks: list[RankEvents]
    states: list[RankState]
    """What each rank does, or did when it was last heard of."""
    stages: StageFacts | None
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    costs: RunCosts | None
    medians: Medians

    def log(self, rank: int) -> str:
        path = self.folder / f"output.log.{rank}"
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def read_evidence(folder: Path) -> Evidence:
    if not folder.is_dir():
        raise ConfigError(f"{folder}: is not the folder of a run: name one that `vpipe train` has made")
    ranks = read_events(folder)
    return Evidence(
        folder,
        ranks,
        findings(folder),
        read_stages(folder),
        read_object(folder / "summary.json"),
        read_metrics(folder),
        run_costs(folder, ranks),
        medians(ranks),
    )
