"""The checkpoints of a run, side by side in one directory.

step-00000100             a checkpoint, whole
.step-00000200.tmp-5f0c   one being written, or being deleted, or left over from a crash
.step-00000100.old-5f0c   one that is being replaced: it counts as long as its successor is not there
"""

import math
import os
import re
import secrets
import shutil
import time
import warnings
from collections.abc import Callable, Collection
from pathlib import Path

from vpipe.checkpoint.files import file_errors
from vpipe.checkpoint.manifest import Manifest, check_size, read_manifest, verify
from vpipe.errors import VPipeError
from vpipe.system.files import is_folder, link_mistake

EVALUATION = "evaluation_loss"
"""The key of `extra` for the loss that was evaluated with just these weights."""

_WHOLE = re.compile(r"step-([0-9]{8,})")
_REPLACED = re.compile(r"\.(step-([0-9]{8,}))\.old-[0-9a-f]+")
_UNFINISHED = re.compile(r"\.step-[0-9]{8,}\.tmp-[0-9a-f]+")


def step_name(updates: int) -> str:
    return f"step-{updates:08d}"


def hidden_name(name: str, kind: str, token: str) -> str:
    """The name of a checkpoint that is `tmp` or `old`; the token distinguishes attempts."""
    return f".{name}.{kind}-{token}"


def newest(directory: Path, report: Callable[[str], None] = warnings.warn) -> Path | None:
    """The newest checkpoint that verifies; those skipped are reported, with what is wrong with them.

    Symbolic links are reported all, also older ones.
    """
    newest_first = list(reversed(checkpoints(directory)))
    for path in newest_first:
        if os.path.islink(path):
            report(f"checkpoint {path} is skipped: {link_mistake(path)}")
    for path in newest_first:
        if os.path.islink(path):
            continue
        try:
            verify(path)
        except VPipeError as error:
            report(f"checkpoint {path} is skipped: {error}")
        else:
            return path
    return None


def prune(
    directory: Path, keep: int, *, spare: Collection[Path] = (), unfinished_after: float = 0.0
) -> list[Path]:
    """Delete all but the `keep` newest checkpoints, the best by evaluation loss, and those to spare.

    Damaged ones (a file missing or cut short) do not count as kept. What crashes left over goes too, once it
    is older than `unfinished_after` seconds. Returns what was deleted. Call it on one rank, and not while a
    checkpoint is being saved into the directory, unless `unfinished_after` is longer than that takes.
    """
    if keep < 1:
        raise VPipeError(f"keep is {keep}: at least one checkpoint must stay")
    newest_first = list(reversed(checkpoints(directory)))
    whole = {path: manifest for path in newest_first if (manifest := _look(path)) is not None}
    kept = list(whole)[:keep]
    spared = {*kept, *spare, *_best(whole)}
    oldest = newest_first.index(kept[-1]) if len(kept) == keep else len(newest_first)
    deleted = [path for path in newest_first[oldest:] if path not in spared and not os.path.islink(path)]
    latest = time.time() - unfinished_after if unfinished_after else math.inf  # whatever the clock was set to
    deleted += [path for path in _entries(directory) if _is_left_over(path) and _changed(path) <= latest]
    for path in deleted:
        _delete(path)
    return deleted


def evaluation_loss(manifest: Manifest) -> float | None:
    loss = manifest.extra.get(EVALUATION)
    return loss if isinstance(loss, int | float) and math.isfinite(loss) else None


def _best(whole: dict[Path, Manifest]) -> list[Path]:
    """The one with the smallest evaluation loss, the newest of several; none if nothing was evaluated."""
    losses = {
        path: loss for path, manifest in whole.items() if (loss := evaluation_loss(manifest)) is not None
    }
    return [min(losses, key=losses.__getitem__)] if losses else []


def _entries(directory: Path) -> list[Path]:
    if not is_folder(directory):
        return []
    with file_errors("list", directory):
        return [path for path in directory.iterdir() if os.path.islink(path) or is_folder(path)]


def checkpoints(directory: Path) -> list[Path]:
    """What may be a checkpoint, the oldest first, symbolic links among them: none is taken, each is reported."""
    numbered = []
    for path in _entries(directory):
        if match := _WHOLE.fullmatch(path.name):
            numbered.append((int(match[1]), path))
        elif (match := _REPLACED.fullmatch(path.name)) and not os.path.lexists(directory / match[1]):
            numbered.append((int(match[2]), path))
    return [path for _, path in sorted(numbered)]


def _is_left_over(path: Path) -> bool:
    replaced = _REPLACED.fullmatch(path.name)
    return bool(_UNFINISHED.fullmatch(path.name) or (replaced and os.path.lexists(path.parent / replaced[1])))


def _look(path: Path) -> Manifest | None:
    """The manifest, if all that it names looks whole."""
    try:
        manifest = read_manifest(path)
        for name, entry in manifest.files.items():
            check_size(path / name, entry)
    except VPipeError:
        return None
    return manifest


def _changed(path: Path) -> float:
    """When something in a folder was last written; now if it is just being deleted."""
    try:
        return max(entry.stat().st_mtime for entry in (path, *path.iterdir()))
    except OSError:
        return time.time()


def _delete(path: Path) -> None:
    """Out of sight first: half a checkpoint must not stand under a checkpoint's name."""
    with file_errors("delete", path):
        if _WHOLE.fullmatch(path.name):
            path = path.rename(path.with_name(hidden_name(path.name, "tmp", secrets.token_hex(4))))
        if os.path.islink(path):
            path.unlink()
        else:
            shutil.rmtree(path)
