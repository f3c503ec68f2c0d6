"""Saving: the stages' files are written side by side, and one rename shows all of them at once.

.step-00000100.tmp-5f0c/stage-000.safetensors    first rank of stage 0    written, synced, hashed
.step-00000100.tmp-5f0c/stage-001.safetensors    first rank of stage 1    written, synced, hashed
.step-00000100.tmp-5f0c/manifest.json            rank 0, when all have    written, synced
step-00000100                                    rank 0                   renamed: now it exists
"""

import json
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

import torch

from vpipe.checkpoint.directory import hidden_name, step_name
from vpipe.checkpoint.files import read_header, sha256, sync, telling, write_tensors
from vpipe.checkpoint.manifest import FileEntry, Manifest, as_json, check_size, write_manifest
from vpipe.communication import agree, agree_on
from vpipe.errors import VPipeError
from vpipe.pipeline import Pipeline
from vpipe.runtime.stage import StageState

OPTIMIZERS = "optimizers"
Written = dict[str, tuple[int, str]]  # file ▶ size and hash


def save(pipe: Pipeline, directory: Path, extra: dict[str, Any]) -> Path:
    """Save the pipeline to `directory/step-<updates>`; call it on every rank at the same update.

    Resuming from it equals never having stopped, to the bit: under the same layout, and compared with a run
    that was drained at the same update, because saving drains an asynchronous pipeline (`Pipeline.flush`).
    Draining makes further updates: call `flush` before you tell the data's position in `extra`, of which
    rank 0's is kept. Replicas must be alike: of buffers in which they differ, such as batch statistics, the
    first replica's are saved.

    All ranks must see the same directory. If one of them cannot write, every rank raises a VPipeError,
    nothing is left behind and what was saved before is untouched: training may go on.
    """
    world = pipe.world
    stages, plain = agree(world, "training state", pipe.training_state)
    agree_on(world, "number of updates", pipe.updates, "save at the same update on every rank")
    token = world.all_gather("checkpoint", secrets.token_hex(4))[0]
    final = directory / step_name(pipe.updates)
    folder = directory / hidden_name(final.name, "tmp", token)

    def make_folder() -> None:
        with telling("make", folder):
            folder.mkdir(parents=True)

    def write_files() -> Written:
        named = {f"stage-{index:03d}.safetensors": stage for index, stage in stages.items()}
        return {name: _write(folder / name, stage) for name, stage in named.items()}

    def commit() -> None:
        entries, records = _look_at(folder, {name: file for part in parts for name, file in part.items()})
        write_manifest(
            folder,
            Manifest(
                updates=pipe.updates,
                layout=_describe(pipe),
                files=entries,
                state={**plain, OPTIMIZERS: records},
                extra=as_json(extra),
            ),
        )
        with telling("rename", folder):
            sync(folder)
            _show(folder, final, token)

    first = world.rank == 0
    try:
        agree(world, "folder of the checkpoint", make_folder if first else _nothing)
        written = agree(world, "files of the checkpoint", write_files)
        parts = world.all_gather("hashes of the checkpoint", written)
        agree(world, "commit of the checkpoint", commit if first else _nothing)
    except BaseException:
        if first:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return final


def _nothing() -> None:
    """What the other ranks do while rank 0 works."""


def _write(path: Path, stage: StageState) -> tuple[int, str]:
    # The records travel in the file to rank 0, which copies them into the manifest.
    write_tensors(path, stage.tensors, {OPTIMIZERS: json.dumps(stage.optimizers)})
    return path.stat().st_size, sha256(path)


def _look_at(folder: Path, written: Written) -> tuple[dict[str, FileEntry], list[Any]]:
    """The entries of all files, which must be in this rank's folder too, and their records."""
    entries: dict[str, FileEntry] = {}
    records: list[Any] = []
    for name, (size, digest) in sorted(written.items()):
        if not (folder / name).is_file():
            raise VPipeError(
                f"{folder / name} was written and rank 0 does not see it: save to a directory that all hosts share"
            )
        names, metadata = read_header(folder / name)
        entries[name] = FileEntry(size=size, sha256=digest, tensors=sorted(names))
        check_size(folder / name, entries[name])
        records += json.loads(metadata[OPTIMIZERS])
    return entries, records


def _describe(pipe: Pipeline) -> dict[str, Any]:
    """For people: nothing of it is needed to load the checkpoint."""
    return {
        "schedule": pipe.schedule.name,
        "partition": list(pipe.layout.partition),
        "placement": [list(ranks) for ranks in pipe.schedule.placement],
        "precision": pipe.layout.precision,
        "torch": torch.__version__,
    }


def _show(folder: Path, final: Path, token: str) -> None:
    """Give the folder its name. One that has the name already is moved aside, and back if that fails."""
    old = final.with_name(hidden_name(final.name, "old", token))
    replaces = final.exists()
    if replaces:
        os.rename(final, old)
    try:
        os.rename(folder, final)
    except OSError:
        if replaces:
            os.rename(old, final)
        raise
    sync(final.parent)
    if replaces:
        shutil.rmtree(old, ignore_errors=True)
