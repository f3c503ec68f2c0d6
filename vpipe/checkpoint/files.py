"""Files of tensors: written, synced, hashed and read, with errors that name the file.

A safetensors file is the length of its header (8 bytes), the header as JSON, and the tensors one behind the
other. It is written here piece by piece, because a save goes on beside the training: a piece that is being
written or hashed leaves the interpreter to others, nothing is copied, and the hash needs no second reading.
"""

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vpipe.errors import NotWrittenError, VPipeError

CHUNK = 1 << 20
READS = ("read", "list")
_KINDS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
    torch.complex64: "C64",
}  # fmt: skip
"""The names of types in safetensors files."""


@contextmanager
def file_errors(what: str, path: Path) -> Iterator[None]:
    """Turn errors of the system or the format into one that names the file, without a traceback."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        kind = VPipeError if what in READS else NotWrittenError
        raise kind(f"cannot {what} {path}: {reason}") from None


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> tuple[int, str]:
    """Write a safetensors file and see it on the disk; its size and its SHA-256."""
    # Wide types first, so that every tensor is aligned to its own type.
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
    size, digest = 0, hashlib.sha256()
    with file_errors("write", path), path.open("wb") as file:
        for piece in (_header(path, ordered, metadata), *map(_bytes_of, ordered.values())):
            for start in range(0, len(piece), CHUNK):
                part = piece[start : start + CHUNK]
                file.write(part)
                digest.update(part)
            size += len(piece)
        file.flush()
        sync(path)
    return size, digest.hexdigest()


def _header(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> memoryview:
    content: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _KINDS:
            raise VPipeError(
                f"cannot write {path}: tensor {name!r} is {tensor.dtype}, which safetensors does not know"
            )
        start, end = end, end + tensor.nbytes
        content[name] = {
            "dtype": _KINDS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    raw = json.dumps(content).encode()
    raw += b" " * (-len(raw) % 8)
    return memoryview(struct.pack("<Q", len(raw)) + raw)


def _bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def read_tensors(path: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """These tensors of a safetensors file, and nothing else of it; they may be views of the file."""
    with file_errors("read", path), safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in names}


def read_header(path: Path) -> tuple[list[str], dict[str, str]]:
    """The names of a file's tensors, and its metadata."""
    with file_errors("read", path), safe_open(path, framework="pt") as file:
        return list(file.keys()), file.metadata() or {}


def not_finite(path: Path) -> str | None:
    """The name of the first tensor in a file that holds a number that is not finite, if one does."""
    with file_errors("read", path), safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (it is no mapping)
            tensor = file.get_tensor(name)
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor.float()).all()):
                return str(name)
    return None


def sync(path: Path) -> None:
    """Return when the file, or the entries of the folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with file_errors("read", path), path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
