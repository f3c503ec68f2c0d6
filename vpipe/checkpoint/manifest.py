"""The manifest of a checkpoint: its files with sizes and hashes, and the training state that is no tensor.

It is written last. It carries a hash of itself, so that a changed learning rate is found like a changed weight.
"""

import hashlib
import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr, ValidationError

from vpipe.checkpoint.files import file_errors, sha256, sync
from vpipe.errors import VPipeError
from vpipe.system.files import LARGE, is_file, is_folder, json_text, link_mistake, read_bounded, short_repr

MANIFEST = "manifest.json"
VERSION = 1

# A name and nothing else: no folder, no way up, no absolute path.
FileName = Annotated[str, Field(pattern=r"^stage-[0-9]{3,}\.safetensors$")]
Number = (
    Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)]
    | Annotated[float, Field(strict=True, allow_inf_nan=False)]
)
Natural = Annotated[int, Field(strict=True, ge=0, lt=2**53)]
Plain = StrictBool | Number | StrictStr | None


class FileEntry(BaseModel):
    """One file: what it must be, and the names of the tensors in it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    size: Annotated[int, Field(strict=True, ge=0)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    tensors: list[str]


class Manifest(BaseModel):
    """`state` is what resuming needs besides tensors, `layout` describes how the run was laid out, `extra` is
    the caller's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["vpipe checkpoint"] = "vpipe checkpoint"
    version: int = VERSION
    updates: Annotated[int, Field(strict=True, ge=0)]
    layout: dict[str, Any]
    files: Annotated[dict[FileName, FileEntry], Field(min_length=1)]
    state: dict[str, Any]
    extra: dict[str, Any]

    def places(self) -> dict[str, str]:
        """The file of each tensor."""
        return {tensor: name for name, entry in self.files.items() for tensor in entry.tensors}


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _Group(_Part):
    parameters: list[StrictStr]
    numbers: dict[str, Number | list[Number]]


class _Record(_Part):
    """Of one base optimizer (`vpipe.weights.optimizer_state`)."""

    optimizer: StrictStr
    groups: list[_Group]
    values: dict[str, dict[str, Plain | list[Plain]]]
    scheduler: dict[str, Any] | None


class _LossScale(_Part):
    enabled: StrictBool
    value: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
    good_updates: Natural


class _State(_Part):
    updates: Natural
    loss_scale: _LossScale
    optimizers: list[_Record]


def as_json(extra: dict[str, Any]) -> dict[str, Any]:
    """The values as they are read back: lists for tuples, text for keys, null for numbers that are not finite."""
    try:
        return json.loads(json_text(extra))
    except (TypeError, ValueError, RecursionError) as error:
        raise VPipeError(
            f"`extra` of a checkpoint must be what JSON can hold (numbers, text, lists, dictionaries): {error}"
        ) from None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    content = manifest.model_dump()
    path = folder / MANIFEST
    with file_errors("write", path):
        path.write_text(json.dumps({**content, "sha256": _hash(content)}, indent=1), encoding="utf-8")
        sync(path)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, checked; the files that it names are not looked at."""
    content = _read_json(folder)
    path = folder / MANIFEST
    version = content.get("version")
    if content.get("format") != "vpipe checkpoint" or not isinstance(version, int):
        raise VPipeError(f"{path} is not the manifest of a checkpoint of vpipe")
    if version != VERSION:
        raise VPipeError(
            f"{path} has format version {version} and this vpipe reads {VERSION}: install another"
        )
    if content.pop("sha256", None) != _hash(content):
        raise VPipeError(f"{path} was changed or damaged after it was written: its hash does not match")
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        place, message, value = _first_problem(error)
        raise VPipeError(f"{path}: {place}: {message}, but it is {short_repr(value)}") from None


def check_state(state: dict[str, Any], path: Path) -> None:
    """Raise unless it has the form that `Pipeline.training_state` gives it: who can write a file can write its hash."""
    try:
        _State.model_validate(state)
    except ValidationError as error:
        place, message, _ = _first_problem(error)
        raise VPipeError(f"{path}: state.{place} in its manifest is wrong: {message.lower()}") from None


def _first_problem(error: ValidationError) -> tuple[str, str, Any]:
    """Place, message and value of the first thing that is wrong."""
    first = error.errors()[0]
    return " ".join(".".join(map(str, first["loc"])).split())[:100], first["msg"], first["input"]


def verify(folder: Path, only: Collection[str] | None = None) -> Manifest:
    """Compare the files (or only those named) with the manifest; the error names the first that differs."""
    manifest = read_manifest(folder)
    for name, entry in manifest.files.items():
        if only is None or name in only:
            check_size(folder / name, entry)
            if sha256(folder / name) != entry.sha256:
                raise VPipeError(f"{folder / name} is damaged: its hash is not the one in {MANIFEST}")
    return manifest


def check_size(path: Path, entry: FileEntry) -> None:
    """Check what can be known of a file without reading it."""
    if os.path.islink(path):
        raise VPipeError(f"{path} is a symbolic link: a checkpoint holds its files itself")
    if not is_file(path):
        raise VPipeError(f"{path} is missing, but {MANIFEST} names it")
    size = path.stat().st_size
    if size != entry.size:
        raise VPipeError(f"{path} is damaged: it has {size} bytes and should have {entry.size}")


def _read_json(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if os.path.islink(folder):
        raise VPipeError(link_mistake(folder))
    if is_file(folder):
        raise VPipeError(
            f"{folder} is a file: a checkpoint is a folder with a {MANIFEST}, such as step-00000100"
        )
    if not is_folder(folder):
        raise VPipeError(f"there is no checkpoint at {folder}")
    if os.path.islink(path) or not is_file(path):
        raise VPipeError(f"{folder} has no {MANIFEST}: it is not a checkpoint, or not a whole one")
    raw = read_bounded(path, LARGE)
    try:
        content = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError):
        raise VPipeError(f"{path} is damaged: it is not JSON") from None
    if not isinstance(content, dict):
        raise VPipeError(f"{path} is not the manifest of a checkpoint of vpipe")
    return content


def _hash(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
