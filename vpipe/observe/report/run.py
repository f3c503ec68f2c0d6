"""What a report knows of one run: everything its folder holds, as plain values for the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vpipe.errors import ConfigError
from vpipe.observe.prediction import predict
from vpipe.observe.report.lanes import timeline
from vpipe.observe.report.memory import memory_lines
from vpipe.observe.report.predicted import predicted
from vpipe.record.events import read_events
from vpipe.record.run_files import read_keys, read_metrics, read_object
from vpipe.record.stages import read_stages

POINTS = 2000
"""Of a curve; a longer one is thinned out."""
SHOWN = (
    "loss", "evaluation_loss", "perplexity", "updates", "samples_per_s", "seconds_per_update", "of_limit",
    "communication_share", "bubble_share", "peak_memory", "ranks", "schedule", "partition", "blocks",
)  # fmt: skip
"""What is taken over from summary.json."""


def run_data(folder: Path, name: str) -> dict[str, Any]:
    """Parts that the folder has no file for are None or empty."""
    summary = read_object(folder / "summary.json")
    plan = read_object(folder / "plan.json")
    metrics = read_metrics(folder)
    train = [line for line in metrics if line.get("kind") == "train"]
    evaluations = [line for line in metrics if line.get("kind") == "evaluation"]
    ranks = read_events(folder)
    stages = read_stages(folder)
    return _finite(
        {
            "name": name,
            "summary": {key: summary[key] for key in SHOWN if key in summary},
            "plan": plan,
            "blocks": summary.get("blocks") or plan.get("blocks") or [],
            "config": read_keys(folder / "config.yml"),
            "losses": _losses(summary, train),
            "evaluations": _curve(evaluations, "loss"),
            "throughput": [point for point in _curve(train, "samples_per_s") if point[1]],
            "learning_rate": _curve(train, "learning_rate"),
            "timeline": timeline(ranks),
            "predicted": predicted(predict(folder, ranks), ranks),
            "memory": memory_lines(ranks),
            "cap": None if stages is None else stages.cap,
            "model_blocks": [] if stages is None else [block._asdict() for block in stages.blocks],
            "placement": [] if stages is None else stages.placement,
        }
    )


def labels(folders: Sequence[Path]) -> list[str]:
    """A name for each run: the last part of its path, with as many before it as it takes to tell them apart."""
    paths = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-length:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    raise ConfigError(f"{folders[0]}: a run is named more than once: name each run once")


def _losses(summary: dict[str, Any], train: list[dict[str, Any]]) -> list[list[float]]:
    """Of each update by the summary, which begins where the run was last restarted; of each line of metrics before
    that, or if there is no summary. [updates made, loss]."""
    told = _curve(train, "loss")
    if summary.get("losses"):
        try:
            losses = [[update + 1, loss] for update, loss in summary["losses"]]
        except (TypeError, ValueError):
            raise ConfigError(
                "summary.json: losses is no list of [update, loss]: remove the file to do without"
            ) from None
        before = [point for point in told if isinstance(point[0], int | float) and point[0] < losses[0][0]]
        return before + thinned(losses)
    return told


def _curve(lines: list[dict[str, Any]], key: str) -> list[list[float]]:
    return thinned([[line["update"], line[key]] for line in lines if key in line])


def thinned(points: list[list[float]]) -> list[list[float]]:
    """At most POINTS of them, evenly spaced, the last one among them."""
    step = -(-len(points) // POINTS)
    return points if step < 2 else points[(len(points) - 1) % step :: step]


def _finite(value: Any) -> Any:
    """The same without nan and infinities, which JSON does not have: a loss may be one."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value
