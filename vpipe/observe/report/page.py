"""The page of a report: a template with its style, its scripts and its data written into it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from vpipe.errors import ConfigError
from vpipe.observe.report.run import labels, run_data
from vpipe.system.files import write_text

SCRIPTS = (
    "format.js",
    "lanes.js",
    "predicted.js",
    "overview.js",
    "life.js",
    "timeline.js",
    "bars.js",
    "charts.js",
    "memory.js",
    "tables.js",
    "main.js",
)
"""In the order in which they are read; each defines functions for the later ones."""


def write_report(run_folders: Sequence[Path], output: Path) -> None:
    """Write the report of the runs; a file that a run's folder lacks leaves out that part."""
    if not run_folders:
        raise ConfigError("there is nothing to report: name the folder of one or more runs")
    for folder in run_folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder}: is not the folder of a run: name one that `vpipe train` has made")
    names = labels(run_folders)
    runs = [run_data(folder, name) for folder, name in zip(run_folders, names, strict=True)]
    write_text(output, _page(" · ".join(names), {"runs": runs}))


def _page(title: str, data: dict[str, Any]) -> str:
    page = _part("report.html")
    scripts = "\n".join(f"<script>\n{_part(name)}</script>" for name in SCRIPTS)
    # The data goes in last: what it says is not looked at for further marks.
    for mark, text in (
        ("{{title}}", escape(title)),
        ("{{style}}", _part("report.css")),
        ("{{scripts}}", scripts),
        ("{{data}}", embedded(data)),
    ):
        page = page.replace(mark, text, 1)
    return page


def embedded(data: Any) -> str:
    """JSON that may stand inside a script element: nothing in it can end the element."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _part(name: str) -> str:
    return (files("vpipe.observe.report") / name).read_text(encoding="utf-8")
