"""Files of tensors: written, synced, hashed and read, each failure an error that names the file."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vpipe.errors import VPipeError

CHUNK = 1 << 20


@contextmanager
def telling(what: str, path: Path) -> Iterator[None]:
    """What the system or the format refuses is a user's matter: no traceback, and the file's name."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise VPipeError(f"cannot {what} {path}: {reason}") from None


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file and see it on the disk."""
    with telling("write", path):
        save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, path, metadata)
        sync(path)


def read_tensors(path: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """These tensors of a safetensors file, and nothing else of it; they may be views of the file."""
    with telling("read", path), safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in names}


def read_header(path: Path) -> tuple[list[str], dict[str, str]]:
    """The names of a file's tensors, and its metadata."""
    with telling("read", path), safe_open(path, framework="pt") as file:
        return list(file.keys()), file.metadata() or {}


def sync(path: Path) -> None:
    """Return when the file, or the entries of the folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with telling("read", path), path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
