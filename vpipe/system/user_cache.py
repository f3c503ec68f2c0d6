"""What is kept for all runs of a user, by content: in a folder that nobody else can write to, and never without bound.

The folder is `$VPIPE_CACHE` (empty: nothing is kept), or `vpipe` in `$XDG_CACHE_HOME` or `~/.cache`. It can be deleted
at any time. What cannot be kept is made again: no error comes from here.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from vpipe.errors import NotWrittenError, VPipeError

VARIABLE = "VPIPE_CACHE"
MOST_FILES = 200
MOST_BYTES = 256 << 20
"""Of each kind; those that were not used for longest go first."""


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
