"""Inspection of saved checkpoints: found, described, examined and pruned."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from vpipe.checkpoint.directory import checkpoints, evaluation_loss, newest, prune
from vpipe.checkpoint.files import file_errors, not_finite
from vpipe.checkpoint.manifest import MANIFEST, Manifest, read_manifest, verify
from vpipe.errors import VPipeError
from vpipe.system.console import warn
from vpipe.system.files import is_file, link_mistake

UNFINISHED_AFTER = 3600.0
"""Seconds after which what is unfinished is taken for left over: a run may be writing what is younger."""


def find(path: Path) -> list[Path]:
    """The checkpoint itself, or those of a run, the oldest first."""
    if os.path.islink(path) and (is_file(path / MANIFEST) or not os.path.exists(path)):
        raise VPipeError(link_mistake(path))
    if is_file(path / MANIFEST):
        return [path]
    for folder in (path / "checkpoints", path):
        if found := checkpoints(folder):
            return found
    raise VPipeError(
        f"there is no checkpoint in {path}: give the folder of a run, or one of its checkpoints/step-..."
    )


def describe(path: Path) -> dict[str, Any]:
    """The manifest in plain values."""
    manifest = read_manifest(path)
    return {
        "path": str(path),
        "updates": manifest.updates,
        "saved": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime((path / MANIFEST).stat().st_mtime)),
        "evaluation_loss": evaluation_loss(manifest),
        "bytes": sum(entry.size for entry in manifest.files.values()),
        "files": {
            name: {"bytes": entry.size, "tensors": len(entry.tensors), "sha256": entry.sha256}
            for name, entry in manifest.files.items()
        },
        "layout": manifest.layout,
        "optimizer": _optimizer(manifest),
        "extra": manifest.extra,
    }


def examine(path: Path) -> str | None:
    """What is wrong with a checkpoint: sizes, hashes, numbers that are not finite; None if nothing is."""
    try:
        for name in verify(path).files:
            if bad := not_finite(path / name):
                raise VPipeError(f"{path / name}: tensor {bad!r} holds numbers that are not finite")
    except VPipeError as error:
        return str(error)
    return None


def newest_whole(path: Path) -> Path:
    """The checkpoint itself, or the newest one of a run that verifies."""
    found = find(path)
    if found == [path]:
        return path
    good = newest(found[0].parent, warn)
    if good is None:
        raise VPipeError(f"no checkpoint in {path} is whole")
    return good


def prune_run(path: Path, keep: int) -> list[Path]:
    """Delete old ones; the newest that verifies stays, also if newer ones are damaged."""
    folder = find(path)[0].parent
    if folder.absolute() == path.absolute().parent:
        raise VPipeError(f"{path} is a checkpoint: give the folder of a run, of which the oldest are deleted")
    good = newest(folder, warn)
    with file_errors("prune", folder):
        return prune(folder, keep, spare=[] if good is None else [good], unfinished_after=UNFINISHED_AFTER)


def _optimizer(manifest: Manifest) -> str | None:
    records = manifest.state.get("optimizers") or []
    kinds = dict.fromkeys(str(record.get("optimizer")) for record in records if isinstance(record, dict))
    return ", ".join(kinds) or None
