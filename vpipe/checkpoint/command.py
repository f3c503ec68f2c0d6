"""What `vpipe checkpoint` does: shows, verifies, exports and prunes what runs have saved."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from rich.table import Table

from vpipe.checkpoint.directory import checkpoints, evaluation_loss, newest, prune
from vpipe.checkpoint.files import not_finite, telling
from vpipe.checkpoint.manifest import MANIFEST, Manifest, read_manifest, verify
from vpipe.checkpoint.pretrained import export_pretrained
from vpipe.errors import VPipeError
from vpipe.sizes import show_bytes

UNFINISHED_AFTER = 3600.0
"""Seconds after which what is unfinished is taken for left over: a run may be writing what is younger."""


def find(path: Path) -> list[Path]:
    """The checkpoint itself, or those of a run, the oldest first."""
    if (path / MANIFEST).is_file():
        return [path]
    for folder in (path / "checkpoints", path):
        if found := checkpoints(folder):
            return found
    raise VPipeError(
        f"there is no checkpoint in {path}: give the folder of a run, or one of its checkpoints/step-..."
    )


def describe(path: Path) -> dict[str, Any]:
    """What the manifest tells, in plain values."""
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


def show_one(described: dict[str, Any]) -> Table:
    table = Table(title=described["path"], show_header=False)
    table.add_column("what", style="bold", no_wrap=True)
    table.add_column("value", overflow="fold")
    for key in ("updates", "saved", "evaluation_loss", "optimizer"):
        if described[key] is not None:
            table.add_row(key.replace("_", " "), str(described[key]))
    for part in ("layout", "extra"):
        for key, value in described[part].items():
            if key != "evaluation_loss":
                table.add_row(key.replace("_", " "), str(value))
    for name, entry in described["files"].items():
        table.add_row(name, f"{entry['tensors']} tensors, {show_bytes(entry['bytes'])}")
    table.add_row("in all", show_bytes(described["bytes"]))
    return table


def show_several(described: list[dict[str, Any]]) -> Table:
    table = Table()
    for name in ("checkpoint", "updates", "saved", "stages", "size", "evaluation loss"):
        table.add_column(name, justify="left" if name in ("checkpoint", "saved") else "right")
    for one in described:
        loss = one["evaluation_loss"]
        table.add_row(
            Path(one["path"]).name,
            str(one["updates"]),
            one["saved"],
            str(len(one["files"])),
            show_bytes(one["bytes"]),
            "" if loss is None else f"{loss:.4f}",
        )
    return table


def examine(path: Path) -> str | None:
    """What is wrong with a checkpoint: sizes, hashes, numbers that are not finite; None if nothing is."""
    try:
        for name in verify(path).files:
            if bad := not_finite(path / name):
                raise VPipeError(f"{path / name}: tensor {bad!r} holds numbers that are not finite")
    except VPipeError as error:
        return str(error)
    return None


def export(path: Path, directory: Path, config: Path | None) -> tuple[Path, list[str]]:
    """Write the newest good checkpoint for `from_pretrained`; which it was, and what it has no values for.

    The tokenizer that the run trained with is written beside it.
    """
    from vpipe.config_file import read_config
    from vpipe.data import read_tokenizer
    from vpipe.datasets import TOKENIZER
    from vpipe.export import write_tokenizer
    from vpipe.models import build_model

    chosen = path
    if not (path / MANIFEST).is_file():
        good = newest(find(path)[0].parent, _warn)
        if good is None:
            raise VPipeError(f"no checkpoint in {path} is whole")
        chosen = good
    described = config or chosen.absolute().parents[1] / "config.yml"
    if not described.is_file():
        raise VPipeError(
            f"there is no {described}, which would say what was trained: give the run's file with --config"
        )
    model: Any = build_model(read_config(described), "meta").model
    missing = export_pretrained(chosen, model, directory)
    tokenizer = chosen.absolute().parents[1] / TOKENIZER
    if tokenizer.is_file():
        write_tokenizer(read_tokenizer(tokenizer, model.config.vocab_size), directory)
    return chosen, missing


def prune_run(path: Path, keep: int) -> list[Path]:
    """Delete old ones; the newest that verifies stays, whatever the newer ones look like."""
    folder = find(path)[0].parent
    if folder.absolute() == path.absolute().parent:
        raise VPipeError(f"{path} is a checkpoint: give the folder of a run, of which the oldest are deleted")
    good = newest(folder, _warn)
    with telling("prune", folder):
        return prune(folder, keep, spare=[] if good is None else [good], unfinished_after=UNFINISHED_AFTER)


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr)


def _optimizer(manifest: Manifest) -> str | None:
    records = manifest.state.get("optimizers") or []
    return str(records[0].get("optimizer")) if records and isinstance(records[0], dict) else None
