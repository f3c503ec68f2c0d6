"""The report of one or several runs: one HTML file with its style, its scripts and the data of the runs inside."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from vpipe.errors import ConfigError, printable
from vpipe.observe.report.lanes import memory_lines, predicted, timeline
from vpipe.record.events import read_events
from vpipe.record.run_folder import (
    check_run_folder,
    earlier_runs,
    is_run_folder,
    read_keys,
    read_metrics,
    read_object,
    read_stages,
)
from vpipe.schedule.palette import css
from vpipe.system.files import exists, write_text

SCRIPTS = ("format.js", "lanes.js", "timeline.js", "stacked.js", "details.js", "charts.js", "page.js")
"""In the order in which they are read; each defines functions for the later ones."""
POINTS = 2000
"""Of a curve; a longer one is thinned out."""
SHOWN = (
    "loss", "evaluation_loss", "perplexity", "updates", "samples_per_s", "tokens_per_s", "mfu", "seconds_per_update",
    "of_limit", "communication_share", "bubble_share", "peak_memory", "ranks", "schedule", "partition", "blocks",
)  # fmt: skip
"""Keys of summary.json that the page shows."""
INCIDENTAL = frozenset((
    "log_directory", "print_frequency", "verbose_frequency", "timeout", "hang_limit", "heartbeat_limit",
    "rendezvous_limit", "prometheus_port", "port", "wandb", "mlflow",
))  # fmt: skip
"""Keys that make no run another."""
IN_A_NAME = 3
"""Keys at most by which runs are named."""
LONGEST_VALUE = 24
"""Letters of a value in a name."""


def report_path(run_folders: Sequence[Path]) -> Path:
    """Where the report goes if nobody says it: into the run's folder; of several runs, beside the last one's."""
    last = run_folders[-1]
    return (
        last / "report.html" if len(run_folders) == 1 else last.parent / f"report-{last.resolve().name}.html"
    )


def only_runs(paths: Sequence[Path]) -> list[Path]:
    """The runs among several paths; `runs/*` also names the reports and the cache beside them."""
    others = [path for path in paths if exists(path) and not is_run_folder(path)]
    return [path for path in paths if path not in others] or list(paths)


def write_report(run_folders: Sequence[Path], output: Path) -> None:
    """Write the report of the runs; a file that a run's folder lacks leaves out that part."""
    if not run_folders:
        raise ConfigError("there is nothing to report: name the folder of one or more runs")
    for folder in run_folders:
        check_run_folder(folder)
    runs = [run_data(folder, name) for folder, name in zip(run_folders, _labels(run_folders), strict=True)]
    differing = differing_keys([run["config"] for run in runs])
    names = [run["name"] for run in runs]
    if len(runs) > 1:
        names = told_apart(names, [run["config"] for run in runs], differing)
    for run, name in zip(runs, names, strict=True):
        run["folder"], run["name"] = run["name"], name
    page = _part("report.html")
    # JSON inside a script element: no "<" in it can end the element. The data goes in last: marks in it are left alone.
    data = json.dumps({"runs": runs, "differing": differing}, separators=(",", ":"), allow_nan=False).replace(
        "<", "\\u003c"
    )
    for mark, text in (
        ("{{title}}", escape(printable(" · ".join(names)))),
        ("{{style}}", _part("report.css").replace("{{palette}}", css(":root"))),
        ("{{scripts}}", "\n".join(f"<script>\n{_part(name)}</script>" for name in SCRIPTS)),
        ("{{data}}", data),
    ):
        page = page.replace(mark, text, 1)
    write_text(output, page)


def _part(name: str) -> str:
    return (files("vpipe.observe.report") / name).read_text(encoding="utf-8")


def run_data(folder: Path, name: str) -> dict[str, Any]:
    """Everything that the page shows of a run; parts that the folder has no file for are None or empty."""
    summary = read_object(folder / "summary.json")
    plan = read_object(folder / "plan.json")
    ranks = read_events(folder)
    stages = read_stages(folder)
    found = {
        "name": name,
        "summary": {key: summary[key] for key in SHOWN if key in summary},
        "plan": plan,
        "blocks": summary.get("blocks") or plan.get("blocks") or [],
        "config": read_keys(folder / "config.yml"),
        "resumed": [[before.resolve().name, updates] for before, updates in earlier_runs(folder)],
        **curves(folder, summary),
        "timeline": timeline(ranks),
        "predicted": predicted(folder, ranks),
        "memory": memory_lines(ranks),
        "cap": None if stages is None else stages.cap,
    }
    # JSON has no nan and no infinities, and a loss may be one: they become null.
    return _shown(json.loads(json.dumps(found), parse_constant=lambda name: None))


def _shown(value: Any) -> Any:
    """The value with all text in it as it may be shown."""
    if isinstance(value, dict):
        return {printable(key): _shown(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_shown(entry) for entry in value]
    return printable(value, lines=True) if isinstance(value, str) else value


def _labels(folders: Sequence[Path]) -> list[str]:
    """A name for each run: the last part of its path, and as many before it as make the names differ."""
    paths = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-length:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    raise ConfigError(f"{folders[0]}: a run is named more than once: name each run once")


def differing_keys(configs: Sequence[dict[str, str]]) -> list[str]:
    """The keys whose values differ between runs, without those that make no run another."""
    keys = dict.fromkeys(key for config in configs for key in config)
    return [key for key in keys if key not in INCIDENTAL and len({config.get(key) for config in configs}) > 1]


def told_apart(names: Sequence[str], configs: Sequence[dict[str, str]], keys: Sequence[str]) -> list[str]:
    """Names that say what differs between runs, such as `schedule gpipe`.

    Where that is nothing, much, or the same for two runs, the given names, which differ, are added or stay.
    """
    if not 0 < len(keys) <= IN_A_NAME:
        return list(names)
    made = [", ".join(f"{key} {_cut(config.get(key, 'default'))}" for key in keys) for config in configs]
    return [f"{new} ({old})" if made.count(new) > 1 else new for new, old in zip(made, names, strict=True)]


def _cut(value: str) -> str:
    return value if len(value) <= LONGEST_VALUE else f"{value[:LONGEST_VALUE]}…"


def curves(folder: Path, summary: dict[str, Any]) -> dict[str, list[list[float]]]:
    """Loss, evaluations and speed; those of a resumed run begin with those of the runs that it goes on from."""
    found = _own_curves(folder, summary)
    for before, updates in earlier_runs(folder):
        for name, points in _own_curves(before, read_object(before / "summary.json")).items():
            first = found[name][0][0] if found[name] else math.inf
            kept = [p for p in points if isinstance(p[0], int | float) and p[0] <= updates and p[0] < first]
            found[name] = kept + found[name]
    return {name: thinned(points) for name, points in found.items()}


def _own_curves(folder: Path, summary: dict[str, Any]) -> dict[str, list[list[float]]]:
    metrics = read_metrics(folder)
    train = [line for line in metrics if line.get("kind") == "train"]
    evaluations = [line for line in metrics if line.get("kind") == "evaluation"]
    return {
        "losses": _losses(summary, train),
        "evaluations": _curve(evaluations, "loss"),
        "throughput": [point for point in _curve(train, "samples_per_s") if point[1]],
    }


def _losses(summary: dict[str, Any], train: list[dict[str, Any]]) -> list[list[float]]:
    """[updates made, loss]: of each update from the summary, which begins at the last restart of the run, and before
    that, or without a summary, of each line of metrics."""
    points = _curve(train, "loss")
    if not summary.get("losses"):
        return points
    try:
        losses = [[update + 1, loss] for update, loss in summary["losses"]]
    except (TypeError, ValueError):
        raise ConfigError(
            "summary.json: losses is no list of [update, loss]: remove the file to do without"
        ) from None
    before = [point for point in points if isinstance(point[0], int | float) and point[0] < losses[0][0]]
    return before + thinned(losses)


def _curve(lines: list[dict[str, Any]], key: str) -> list[list[float]]:
    return thinned([[line["update"], line[key]] for line in lines if key in line])


def thinned(points: list[list[float]]) -> list[list[float]]:
    """At most POINTS of them, evenly spaced, the last one among them."""
    step = -(-len(points) // POINTS)
    return points if step < 2 else points[(len(points) - 1) % step :: step]
