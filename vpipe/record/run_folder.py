"""The folder of a run: its name, the log of each rank, and readers for the small files in it.

Readers accept what an interrupted run leaves behind: a missing file, or a last line that is cut off.
"""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from vpipe.errors import ConfigError, printable
from vpipe.system.files import LARGE, is_file, is_folder, parse_yaml, read_json, read_text

STAGES = "stages.json"
LARGEST = 1 << 30
"""Bytes of a file that grows with the run."""


def make_run_folder(log_directory: Path) -> Path:
    """`<log_directory>/<timestamp>`; a run that starts within the same second gets a number behind it."""
    place = f"log_directory is {str(log_directory)!r}"
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for number in range(1, 1000):
        folder = log_directory / (stamp if number == 1 else f"{stamp}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if is_folder(log_directory):
                continue
            raise ConfigError(f"{place}: it is not a directory") from None
        except OSError as error:
            raise ConfigError(
                f"{place}: no folder can be made there ({error.strerror}): give a directory that you may write to"
            ) from None
        return folder
    raise ConfigError(f"{place}: it holds a thousand runs of this second")


def newest_runs(log_directory: Path) -> list[Path]:
    """The runs of a log directory, the newest first."""
    if not is_folder(log_directory):
        return []
    runs = [path for path in log_directory.iterdir() if os.path.isfile(path / "config.yml")]
    return sorted(runs, key=lambda path: ((path / "config.yml").stat().st_mtime_ns, path.name), reverse=True)


def check_run_folder(folder: Path) -> None:
    """Raise for a folder that a user names and that does not exist."""
    if not is_folder(folder):
        raise ConfigError(f"{folder}: is not the folder of a run: name one that `vpipe train` has made")


class RankLog:
    """`output.log.<rank>`: a line for each event. The output of the rank's process may go there too."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("a", encoding="utf-8", buffering=1)

    def line(self, text: str) -> None:
        self.file.write(printable(text, lines=True) + "\n")

    def close(self) -> None:
        self.file.close()


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file."""
    if not is_file(path):
        return {}
    value = read_json(path, most=LARGEST)
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must hold an object, not {type(value).__name__}; remove it to do without")
    return value


def read_lines(path: Path, key: str = "update") -> list[dict[str, Any]]:
    """The lines that are JSON objects with `key`; an unfinished last line is skipped."""
    lines = []
    for line in read_text(path, most=LARGEST).splitlines() if is_file(path) else ():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and key in value:
            lines.append(value)
    return lines


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl. A restarted run repeats some updates: the last line of each counts."""
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
    if not is_file(path):
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


class BlockFacts(BaseModel, frozen=True):
    name: str
    stage: int
    flops: int
    cut_bytes: int
    """Bytes that cross the cut behind the block."""


class StageFacts(BaseModel, frozen=True):
    """`stages.json`, written when training begins, so that an interrupted run has it too."""

    synchronous: bool
    update_interval: int
    placement: tuple[tuple[int, ...], ...]
    """The ranks of each stage."""
    edges: tuple[tuple[int, int], ...]
    blocks: tuple[BlockFacts, ...]
    cap: int | None
    """Memory that a rank may use, if the configuration limits it."""

    def of_stage(self, stage: int) -> list[BlockFacts]:
        return [block for block in self.blocks if block.stage == stage]


def read_stages(folder: Path) -> StageFacts | None:
    """None for a run that has no such file."""
    path = folder / STAGES
    if not is_file(path):
        return None
    try:
        return StageFacts.model_validate(read_json(path, most=LARGE))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(
            f"{path}: does not describe stages: {key}: {first['msg']}; remove it to do without"
        ) from None
