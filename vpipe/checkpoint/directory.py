"""The checkpoints of a run, side by side in one directory.

step-00000100             a checkpoint, whole
.step-00000200.tmp-5f0c   one being written, or being deleted, or left over from a crash
.step-00000100.old-5f0c   one that is being replaced: it counts as long as its successor is not there
"""

import re
import secrets
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

from vpipe.checkpoint.files import telling
from vpipe.checkpoint.manifest import check_size, read_manifest, verify
from vpipe.errors import VPipeError

_WHOLE = re.compile(r"step-([0-9]{8,})")
_REPLACED = re.compile(r"\.(step-([0-9]{8,}))\.old-[0-9a-f]+")
_UNFINISHED = re.compile(r"\.step-[0-9]{8,}\.tmp-[0-9a-f]+")


def step_name(updates: int) -> str:
    return f"step-{updates:08d}"


def hidden_name(name: str, kind: str, token: str) -> str:
    """The name of a checkpoint that is `tmp` or `old`; the token tells attempts apart."""
    return f".{name}.{kind}-{token}"


def newest(directory: Path, report: Callable[[str], None] = warnings.warn) -> Path | None:
    """The newest checkpoint that verifies; those passed over are reported, with what is wrong with them."""
    for path in reversed(_checkpoints(directory)):
        try:
            verify(path)
        except VPipeError as error:
            report(f"checkpoint {path} is passed over: {error}")
        else:
            return path
    return None


def prune(directory: Path, keep: int) -> list[Path]:
    """Delete all but the `keep` newest checkpoints, and what crashes left over; returns what was deleted.

    Damaged ones (a file missing or cut short) do not count as kept. Call it on one rank, and not while a
    checkpoint is being saved into the directory.
    """
    if keep < 1:
        raise VPipeError(f"keep is {keep}: at least one checkpoint must stay")
    kept, doomed = 0, []
    for path in reversed(_checkpoints(directory)):
        if kept == keep:
            doomed.append(path)
        elif _looks_whole(path):
            kept += 1
    doomed += [path for path in _entries(directory) if _is_left_over(path)]
    for path in doomed:
        _delete(path)
    return doomed


def _entries(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    with telling("list", directory):
        return [path for path in directory.iterdir() if path.is_dir() and not path.is_symlink()]


def _checkpoints(directory: Path) -> list[Path]:
    """What may be a checkpoint, the oldest first."""
    numbered = []
    for path in _entries(directory):
        if match := _WHOLE.fullmatch(path.name):
            numbered.append((int(match[1]), path))
        elif (match := _REPLACED.fullmatch(path.name)) and not (directory / match[1]).exists():
            numbered.append((int(match[2]), path))
    return [path for _, path in sorted(numbered)]


def _is_left_over(path: Path) -> bool:
    replaced = _REPLACED.fullmatch(path.name)
    return bool(_UNFINISHED.fullmatch(path.name) or (replaced and (path.parent / replaced[1]).exists()))


def _looks_whole(path: Path) -> bool:
    try:
        for name, entry in read_manifest(path).files.items():
            check_size(path / name, entry)
    except VPipeError:
        return False
    return True


def _delete(path: Path) -> None:
    """Out of sight first: half a checkpoint must not stand under a checkpoint's name."""
    with telling("delete", path):
        if _WHOLE.fullmatch(path.name):
            path = path.rename(path.with_name(hidden_name(path.name, "tmp", secrets.token_hex(4))))
        shutil.rmtree(path)
