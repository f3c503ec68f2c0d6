"""The small files of a run's folder, read with patience: a run that was ended has left some out, or unfinished."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import yaml

from vpipe.errors import ConfigError
from vpipe.system.files import parse_yaml, read_json, read_text


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file."""
    if not path.is_file():
        return {}
    value = read_json(path)
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must hold an object, not {type(value).__name__}; remove it to do without")
    return value


def read_lines(path: Path, key: str = "update") -> list[dict[str, Any]]:
    """Objects, one a line, that have `key`. A run that was ended has an unfinished last line: it is left out."""
    if not path.is_file():
        return []
    lines = []
    for line in read_text(path).splitlines():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and key in value:
            lines.append(value)
    return lines


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl. A run that was restarted made some updates again: what it told last counts."""
    least: dict[str, float] = {}
    kept = []
    for line in reversed(read_lines(folder / "metrics.jsonl")):
        kind, update = line.get("kind"), line["update"]
        if isinstance(kind, str) and isinstance(update, int | float):
            if update >= least.get(kind, math.inf):
                continue
            least[kind] = update
        kept.append(line)
    return kept[::-1]


def read_keys(path: Path) -> dict[str, str]:
    """The keys of a run's configuration as they would be written on the command line."""
    if not path.is_file():
        return {}
    try:
        values = parse_yaml(read_text(path))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}; remove it to do without") from None
    if not isinstance(values, dict):
        return {}
    return {
        str(key): value if isinstance(value, str) else json.dumps(value, default=str)
        for key, value in values.items()
    }
