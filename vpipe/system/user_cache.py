"""What is kept for all runs of a user, by content: in a folder that nobody else can write to, and never without bound.

The folder is `$VPIPE_CACHE` (empty: nothing is kept), or `vpipe` in `$XDG_CACHE_HOME` or `~/.cache`. It can be deleted
at any time. What cannot be kept is made again: no error comes from here.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vpipe.errors import NotWrittenError, VPipeError

VARIABLE = "VPIPE_CACHE"
MOST_FILES = 200
MOST_BYTES = 256 << 20
"""Of each kind; those that were not used for longest go first."""
PATIENCE = 300.0
"""Seconds for which a process waits for another one that makes the same."""
POLL = 0.05


def keeps(kind: str) -> bool:
    """Whether anything of this kind can be kept."""
    return _folder(kind) is not None


def find(kind: str, name: str) -> Path | None:
    """What was kept under this name, if it is ours and private."""
    folder = _folder(kind)
    if folder is None or not _is_private(file := folder / name, stat.S_ISREG):
        return None
    with suppress(OSError):
        os.utime(file)  # it is used
    return file


def keep(kind: str, name: str, write: Callable[[Path], None]) -> None:
    """Keep what `write` writes to the path that it is given."""
    folder = _folder(kind)
    if folder is None:
        return
    beside = folder / f".{name}.{secrets.token_hex(4)}"
    try:
        write(beside)
        os.chmod(beside, 0o600)
        os.replace(beside, folder / name)
        _prune(folder)
    except (OSError, NotWrittenError, VPipeError):
        with suppress(OSError):
            beside.unlink()


@contextmanager
def making(kind: str, name: str, patience: float = PATIENCE) -> Iterator[None]:
    """Around the making of what will be kept: the first process makes it, and the others wait for that.

    Then they find it, or all make it themselves: what cannot be kept, or is made by a process that has died, is stopped
    or is slow.
    """
    folder = _folder(kind)
    path = None if folder is None else folder / f".{name}.lock"
    lock = None if path is None else _open_lock(path)
    if path is None or lock is None:
        yield
        return
    try:
        if not _take(lock):
            _wait_for(lock, patience)
        yield
    finally:
        with suppress(OSError):
            path.unlink()  # who waits has it open
        os.close(lock)


def _wait_for(lock: int, patience: float) -> None:
    deadline = time.monotonic() + patience
    while not _take(lock):
        if time.monotonic() > deadline:
            return
        time.sleep(POLL)
    fcntl.flock(lock, fcntl.LOCK_UN)  # for the others who wait


def _open_lock(path: Path) -> int | None:
    with suppress(OSError):
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    return None


def _take(lock: int) -> bool:
    """Whether we have it; where a file system has no locks, everybody has."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _folder(kind: str) -> Path | None:
    """The folder, made if need be; None if nothing is to be kept, or others can write there."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    root = Path(os.environ.get(VARIABLE, os.path.join(home, "vpipe")))
    if not root.is_absolute():
        return None
    folder = root / kind
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return None
    return folder if all(_is_private(each, stat.S_ISDIR) for each in (root, folder)) else None


def _is_private(path: Path, is_kind: Callable[[int], bool]) -> bool:
    """Whether it is of that kind, this user's (or root's), and nobody else can write to it."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return (
        is_kind(found.st_mode)
        and found.st_uid in (os.geteuid(), 0)
        and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    )


def _prune(folder: Path) -> None:
    files = [(entry.stat(), entry.path) for entry in os.scandir(folder) if not entry.is_symlink()]
    held = 0
    for number, (found, path) in enumerate(sorted(files, key=lambda each: each[0].st_mtime, reverse=True)):
        held += found.st_size
        if number and (number >= MOST_FILES or held > MOST_BYTES):
            with suppress(OSError):
                os.unlink(path)
