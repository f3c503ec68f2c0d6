"""Checkpoints of ranks whose hosts share no folder: files travel to rank 0's host when saved, and from it when loaded.

All checkpoints are then in the folder of rank 0's host. The ranks connect for each save and each load; both ends prove
that they belong to the job (`communication/peers.py`).
"""

import hashlib
import json
import os
import secrets
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from vpipe.checkpoint.files import sync
from vpipe.checkpoint.manifest import MANIFEST
from vpipe.communication import World
from vpipe.communication.sockets import receive_exactly
from vpipe.errors import PeerError, VPipeError
from vpipe.system.host_identity import host_identity

CHUNK = 1 << 20
LOOK = 0.02  # seconds between two looks at what the others have published
_LENGTH = struct.Struct(">Q")


def ranks_apart(world: World, directory: Path) -> frozenset[int] | None:
    """The ranks that do not see the directory of rank 0; None if rank 0 cannot write there. Every rank calls it."""
    if len(set(world.all_gather("hosts", host_identity()))) == 1:
        return frozenset()
    marker = directory / f".seen-{world.all_gather('marker', secrets.token_hex(8))[0]}"
    if world.rank == 0:
        with suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
            marker.touch()
    world.all_gather("marker made", None)
    seen = world.all_gather("marker seen", marker.exists())
    if world.rank == 0:
        with suppress(OSError):
            marker.unlink()
    return frozenset(rank for rank, sees in enumerate(seen) if not sees) if seen[0] else None


def gather_files(
    world: World, name: str, apart: frozenset[int], folder: Path, parts: Callable[[int], Mapping[str, Any]]
) -> None:
    """Bring the files of the ranks apart to rank 0's folder. Every rank's writer calls it, beside the training.

    `parts` gives the names, sizes and hashes of what a rank has written, once it has.
    """
    peers = sorted(apart) if world.rank == 0 else [0] if world.rank in apart else []
    links = world.connect_streams(name, peers, lambda key, value: _published_by_all(world, key, value))
    with ExitStack() as stack:
        for link in links.values():
            stack.enter_context(closing(link))
        with _errors(name):
            if world.rank:
                for link in links.values():
                    for file in sorted(parts(world.rank)):
                        _send_file(link, folder / file)
                    link.shutdown(socket.SHUT_WR)
                    link.recv(1)  # until rank 0 has it
                return
            for rank, link in links.items():
                for file, (size, digest) in sorted(parts(rank).items()):
                    if _receive_file(link, folder / file, size) != digest:
                        raise VPipeError(f"{file} of rank {rank} was damaged on the way")


@contextmanager
def local_copy(world: World, path: Path) -> Iterator[Path]:
    """The checkpoint as this host has it: itself, or a copy of rank 0's in a temporary folder. Every rank calls it."""
    rows = world.all_gather("checkpoint seen", [_digest(path / MANIFEST), host_identity()])
    apart = [rank for rank, (digest, _) in enumerate(rows) if digest != rows[0][0]]
    if not apart or rows[0][0] is None:
        yield path
        return
    first = {rows[rank][1]: rank for rank in reversed(apart)}
    fetchers = sorted(first.values())
    peers = fetchers if world.rank == 0 else [0] if world.rank in fetchers else []
    links = world.connect_streams("checkpoint copies", peers, world.all_gather)
    with ExitStack() as stack:
        for link in links.values():
            stack.enter_context(closing(link))
        copy = ""
        with _errors("the copy of the checkpoint"):
            if world.rank == 0:
                for link in links.values():
                    _send_folder(link, path)
            elif links:
                copy = tempfile.mkdtemp(prefix="vpipe-checkpoint-")
                stack.callback(shutil.rmtree, copy, ignore_errors=True)
                _receive_folder(links[0], Path(copy))
        copies = world.all_gather("checkpoint copy", copy)
        yield Path(copies[first[rows[world.rank][1]]]) if world.rank in apart else path


def _published_by_all(world: World, key: str, value: Any) -> list[Any]:
    """A gather for a thread beside the training."""
    world.publish(key, value)
    gathered: list[Any] = []
    while len(gathered) < world.size:
        theirs = world.published(key, len(gathered))
        if theirs is None:
            time.sleep(LOOK)
        else:
            gathered.append(theirs)
    return gathered


@contextmanager
def _errors(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PeerError(f"{what}: a file did not arrive: {error.strerror or error}") from None


def _digest(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def _send_file(link: socket.socket, path: Path) -> None:
    with path.open("rb") as file:
        link.sendfile(file)


def _receive_file(link: socket.socket, path: Path, size: int) -> str:
    """Its hash."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        while size:
            part = link.recv(min(size, CHUNK))
            if not part:
                raise ConnectionResetError("the connection was closed")
            digest.update(part)
            file.write(part)
            size -= len(part)
        file.flush()
        os.fsync(file.fileno())
    sync(path.parent)
    return digest.hexdigest()


def _send_folder(link: socket.socket, folder: Path) -> None:
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    header = json.dumps(files).encode()
    link.sendall(_LENGTH.pack(len(header)) + header)
    for name in files:
        _send_file(link, folder / name)


def _receive_folder(link: socket.socket, folder: Path) -> None:
    (length,) = _LENGTH.unpack(receive_exactly(link, _LENGTH.size))
    for name, size in json.loads(receive_exactly(link, length)).items():
        _receive_file(link, folder / Path(name).name, size)
