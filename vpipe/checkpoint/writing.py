"""The writers of a snapshot: each rank writes its stages' files, rank 0 commits them all.

They report through `World.publish`, so only the writers wait. Until rank 0 has renamed the folder there is no
checkpoint, whichever rank dies; and rank 0 renames only what all ranks have seen on the disk.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vpipe.checkpoint.apart import gather_files
from vpipe.checkpoint.directory import hidden_name
from vpipe.checkpoint.files import file_errors, read_header, sync, write_tensors
from vpipe.checkpoint.manifest import FileEntry, Manifest, check_size, write_manifest
from vpipe.communication import World
from vpipe.errors import NotWrittenError, VPipeError
from vpipe.stage.stage import StageState
from vpipe.system import faults
from vpipe.system.files import is_file

OPTIMIZERS = "optimizers"
SOON, LATER = 0.002, 0.1  # seconds between two looks at what another rank has published


@dataclass(frozen=True)
class WriteJob:
    """One save, as each rank's writer needs it."""

    world: World
    final: Path
    token: str
    stages: Mapping[int, StageState]
    updates: int
    layout: dict[str, Any]
    state: dict[str, Any]
    extra: dict[str, Any]
    apart: frozenset[int]
    """The ranks that do not see rank 0's folder."""

    @property
    def folder(self) -> Path:
        """Where the files are until they are a checkpoint."""
        return self.final.with_name(hidden_name(self.final.name, "tmp", self.token))


def write(job: WriteJob) -> Path:
    """Save, together with the writers of all other ranks; the same outcome on each of them."""
    world = job.world
    world.publish(f"written {job.token}", _attempt(lambda: _write_files(job)))
    moved = None
    if job.apart:
        name, written = f"files {job.token}", lambda rank: _wait_for(job, "written", rank)[1] or {}
        moved, _ = _attempt(lambda: gather_files(world, name, job.apart, job.folder, written))
    if world.rank == 0:
        world.publish(f"committed {job.token}", _attempt(lambda: _commit(job, moved)))
    if (failure := _wait_for(job, "committed", 0)[0]) is not None:
        shutil.rmtree(job.folder, ignore_errors=True)  # no rank writes any more
        raise NotWrittenError(f"checkpoint {job.final} was not saved: {failure}")
    if world.rank in job.apart:
        shutil.rmtree(job.folder, ignore_errors=True)  # the checkpoint is on rank 0's host
        with suppress(OSError):  # other ranks have files there
            job.folder.parent.rmdir()
    return job.final


def _attempt(work: Callable[[], Any]) -> tuple[str | None, Any]:
    """What went wrong, or None, and the result."""
    try:
        return None, work()
    except Exception as error:
        return (str(error) if isinstance(error, VPipeError) else f"{type(error).__name__}: {error}"), None


def _wait_for(job: WriteJob, what: str, rank: int) -> tuple[str | None, Any]:
    pause = SOON
    while (published := job.world.published(f"{what} {job.token}", rank)) is None:
        time.sleep(pause)
        pause = min(LATER, 1.5 * pause)
    return published


def _write_files(job: WriteJob) -> dict[str, tuple[int, str]]:
    """Size and hash of each file of this rank."""
    with file_errors("make", job.folder):
        job.folder.mkdir(parents=True, exist_ok=True)
    faults.point("ckpt_write", job.updates)
    written = {}
    for index, stage in job.stages.items():
        name = f"stage-{index:03d}.safetensors"
        # The records travel in the file to rank 0, which copies them into the manifest.
        records = {OPTIMIZERS: json.dumps(stage.optimizers)}
        written[name] = write_tensors(job.folder / name, stage.tensors, records)
    return written


def _commit(job: WriteJob, moved: str | None) -> None:
    """Rank 0, when all have written; `moved` says what went wrong with files of other hosts."""
    parts = [_wait_for(job, "written", rank) for rank in range(job.world.size)]
    for rank, (failure, _) in enumerate(parts):
        if failure is not None:
            raise VPipeError(f"rank {rank}: {failure}")
    if moved is not None:
        raise VPipeError(moved)
    entries: dict[str, FileEntry] = {}
    records: list[Any] = []
    for name, (size, digest) in sorted(item for _, part in parts for item in part.items()):
        file = job.folder / name
        if not is_file(file):
            raise VPipeError(
                f"{file} was written and rank 0 does not see it: save to a directory that all hosts share"
            )
        names, metadata = read_header(file)
        entries[name] = FileEntry(size=size, sha256=digest, tensors=sorted(names))
        check_size(file, entries[name])
        records += json.loads(metadata[OPTIMIZERS])
    state = {**job.state, OPTIMIZERS: records}
    manifest = Manifest(updates=job.updates, layout=job.layout, files=entries, state=state, extra=job.extra)
    write_manifest(job.folder, manifest)
    faults.point("ckpt_commit", job.updates)
    with file_errors("rename", job.folder):
        sync(job.folder)
        _show(job.folder, job.final, job.token)


def _show(folder: Path, final: Path, token: str) -> None:
    """Give the folder its name. One that has the name already is moved aside, and back if that fails."""
    old = final.with_name(hidden_name(final.name, "old", token))
    replaces = os.path.lexists(final)
    if replaces:
        os.rename(final, old)
    try:
        os.rename(folder, final)
    except OSError:
        if replaces:
            os.rename(old, final)
        raise
    sync(final.parent)
    if os.path.islink(old):
        old.unlink()
    elif replaces:
        shutil.rmtree(old, ignore_errors=True)
