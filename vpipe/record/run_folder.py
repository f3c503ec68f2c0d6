"""The folder of a run: its name, and readers for the small files in it.

Readers accept what an interrupted run leaves behind: a missing file, or a last line that is cut off. Of long files they
keep a bounded part.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from vpipe.errors import ConfigError
from vpipe.record.thinning import Curve
from vpipe.system.files import LARGE, is_file, is_folder, parse_yaml, read_json, read_text, write_json

STAGES = "stages.json"
RESUMED = "resumed.json"
MOST_RESUMED = 100
COMPLETE, STOPPED, FAILED = "complete", "stopped by you", "failed"
"""How a run has ended: the key `ended` of its summary."""
LONGEST = 1 << 20
"""Characters of a line that are read at a time; what is longer is not ours."""
STAMP = "%Y%m%d-%H%M%S"
_NAME = re.compile(r"(\d{8}-\d{6})(?:-(\d+))?")
_FILES = (
    "output.log.", "config.yml", "metrics.jsonl", "summary.json", STAGES, "status.", "events.", "trace.json",
    "plan.json", "checkpoints",
)  # fmt: skip
"""How the names of what a run leaves begin."""
LARGEST = 1 << 30
"""Bytes of a file that grows with the run."""


def make_run_folder(log_directory: Path) -> Path:
    """`<log_directory>/<timestamp>`, or with a number behind it if a run of this second is there.

    The clock may have been set back since the last run: then the new run has that one's timestamp and the next number,
    so that the newest run is always the one whose name comes last.
    """
    last, used = max(map(_age, _run_folders(log_directory)), default=("", 0))
    stamp = max(time.strftime(STAMP), last)
    for number in count(used + 1 if stamp == last else 1):
        folder = log_directory / (stamp if number == 1 else f"{stamp}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if is_folder(log_directory):
                continue
            raise ConfigError(f"log_directory is {str(log_directory)!r}: it is not a directory") from None
        except OSError as error:
            raise _not_writable(log_directory, error.strerror) from None
        return folder
    raise AssertionError("the numbers have no end")


def make_log_directory(path: Path) -> None:
    """Make it if it does not exist; raise if no run can have a folder there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_writable(path, error.strerror) from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise _not_writable(path, os.strerror(errno.EACCES))


def _not_writable(log_directory: Path, reason: str | None) -> ConfigError:
    return ConfigError(
        f"log_directory is {str(log_directory)!r}: no folder can be made there ({reason}): give a directory that you "
        "may write to"
    )


def make_folder(folder: Path) -> None:
    """The folder of a run on a host that may not share it with the others."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the run's folder {folder} cannot be made there ({error.strerror}): give a log_directory that can be made "
            "on every host, as an absolute path"
        ) from None


def log_path(folder: Path, rank: int) -> Path:
    """The log of a rank."""
    return folder / f"output.log.{rank}"


def newest_runs(log_directory: Path) -> list[Path]:
    """The runs of a log directory, the newest first."""
    runs = [path for path in _folders(log_directory) if (path / "config.yml").is_file()]
    return sorted(runs, key=_age, reverse=True)


def _folders(log_directory: Path) -> list[Path]:
    try:
        return [path for path in log_directory.iterdir() if path.is_dir()]
    except OSError:
        return []


def _run_folders(log_directory: Path) -> list[Path]:
    """Those that have the name of a run."""
    return [path for path in _folders(log_directory) if _NAME.fullmatch(path.name)]


def _age(run: Path) -> tuple[str, int]:
    """Timestamp and number, greater for a newer run; of a folder that was renamed, the time at which it was written."""
    if found := _NAME.fullmatch(run.name):
        return found[1], int(found[2] or 1)
    return time.strftime(STAMP, time.localtime((run / "config.yml").stat().st_mtime)), 0


def is_run_folder(folder: Path) -> bool:
    """Whether it holds what a run leaves, or nothing yet."""
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError:
        return False
    return not names or any(name.startswith(_FILES) for name in names)


def check_run_folder(folder: Path) -> None:
    """Raise for what a user names and is not the folder of a run."""
    if not is_run_folder(folder):
        inside = next(iter(newest_runs(folder)), None)
        raise ConfigError(
            f"{folder}: is not the folder of a run: name one that `vpipe train` has made"
            + ("" if inside is None else f", such as {inside}")
        )


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file."""
    if not is_file(path):
        return {}
    value = read_json(path, most=LARGEST)
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must hold an object, not {type(value).__name__}; remove it to do without")
    return value


def read_lines(path: Path, key: str = "update") -> Iterator[dict[str, Any]]:
    """The lines that are JSON objects with `key`, one by one; an unfinished last line is skipped."""
    try:
        with path.open(encoding="utf-8") as file:
            while line := file.readline(LONGEST):
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(value, dict) and key in value:
                    yield value
    except FileNotFoundError:
        return
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not a text file in UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, thinned out if there are many of a kind.

    A restarted run repeats some updates: the last line of each counts.
    """
    kinds: dict[str, Curve[tuple[int, dict[str, Any]]]] = {}
    for number, line in enumerate(read_lines(folder / "metrics.jsonl")):
        update = line["update"]
        kept = kinds.setdefault(str(line.get("kind")), Curve())
        if isinstance(update, int | float):
            kept.drop_while(partial(_repeats, update))
        kept.add((number, line))
    return [line for _, line in sorted((point for kept in kinds.values() for point in kept), key=_first)]


def _repeats(update: float, point: tuple[int, dict[str, Any]]) -> bool:
    earlier = point[1]["update"]
    return isinstance(earlier, int | float) and earlier >= update


def _first(point: tuple[int, dict[str, Any]]) -> int:
    return point[0]


def write_resumed(folder: Path, checkpoint: Path, updates: int) -> None:
    """Note for a run the one whose checkpoint it goes on from, after so many updates."""
    before = checkpoint.absolute().parents[1]
    write_json(folder / RESUMED, {"run": os.path.relpath(before, folder.absolute()), "updates": updates})


def earlier_runs(folder: Path) -> list[tuple[Path, int]]:
    """The runs that this one goes on from, the last one first, and the updates after which each was left."""
    found: list[tuple[Path, int]] = []
    seen = {folder.resolve()}
    while len(found) < MOST_RESUMED:
        noted = read_object(folder / RESUMED)
        run, updates = noted.get("run"), noted.get("updates")
        if not isinstance(run, str) or not isinstance(updates, int):
            break
        folder = folder / run
        if folder.resolve() in seen or not is_folder(folder):
            break
        seen.add(folder.resolve())
        found.append((folder, updates))
    return found


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
