"""Owners of files: what another user has put into a shared folder is not taken for ours.

Root is trusted: it may do anything anyhow.
"""

import getpass
import os
import re
import stat
import tempfile
from pathlib import Path

from vpipe.errors import VPipeError

COMPILER_CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""Where torch keeps the code that it has compiled, and finds it again."""


def is_ours(path: Path) -> bool:
    """Whether it exists, is no symbolic link, and belongs to this user (or root), with the folder that it is in."""
    return _owner_of(path) in (os.geteuid(), 0) and _owner_of(path.absolute().parent.resolve()) in (
        os.geteuid(),
        0,
    )


def _owner_of(path: Path) -> int | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return None if stat.S_ISLNK(found.st_mode) else found.st_uid


def own_compiler_cache() -> None:
    """Make torch's folder of compiled code, which is run when it is found, or check that nobody else has made it.

    By default it is in /tmp under a name that everybody can guess.
    """
    written = os.environ.get(COMPILER_CACHE)
    try:
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (KeyError, OSError):  # a user without a name
        user = f"uid_{os.geteuid()}"
    folder = Path(written or Path(tempfile.gettempdir(), f"torchinductor_{user}"))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat() if written is None else folder.stat()
    except OSError as error:
        raise VPipeError(
            f"compile needs the folder {folder}: {error.strerror}: name another one in {COMPILER_CACHE}"
        ) from None
    if (
        found.st_uid not in (os.geteuid(), 0)
        or not stat.S_ISDIR(found.st_mode)
        or found.st_mode & stat.S_IWOTH
    ):
        raise VPipeError(
            f"compile would run code from {folder}, where another user can write: remove it, or name a folder of "
            f"your own in {COMPILER_CACHE}"
        )
    os.environ[COMPILER_CACHE] = str(folder)
