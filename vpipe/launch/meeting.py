"""The address and the secret of a job in a file: for ranks that share a folder, and have no common parent to tell them.

Rank 0 opens the socket of the rendezvous and writes the file, which only its user can read. The others wait for it. It
is removed when all ranks have met.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from vpipe.errors import PeerError
from vpipe.system.deadline import Deadline
from vpipe.system.environment import SECRET
from vpipe.system.files import json_text, path_errors

MEETING = "VPIPE_MEETING"
"""Set for rank 0: the file, to be removed."""
POLL = 0.1
MOST = 1 << 16
"""Bytes of the file."""


class Meeting(NamedTuple):
    address: str
    port: int
    secret: str
    """Empty if every rank has been given VPIPE_SECRET."""


def write_meeting(path: Path, meeting: Meeting | PeerError) -> None:
    """Publish where the ranks meet, or why they cannot; it takes effect at once or not at all."""
    content = {"error": str(meeting)} if isinstance(meeting, PeerError) else meeting._asdict()
    hidden = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    with path_errors(path, "written"):
        descriptor = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(json_text(content))
        os.rename(hidden, path)
    os.environ[MEETING] = str(path)


def read_meeting(path: Path, limit: float) -> Meeting:
    """Wait for rank 0's file."""
    deadline = Deadline(limit)
    while (text := _read(path)) is None:
        if not deadline.left():
            raise PeerError(
                f"rank 0 has written no address to {path} within {limit:g} s: start every rank in a folder that all "
                "hosts share, or give a log_directory there"
            )
        time.sleep(POLL)
    try:
        content = json.loads(text)
        if "error" in content:
            raise PeerError(*f"stopped because rank 0 failed: {content['error']}".split("\n", 1))
        return Meeting(str(content["address"]), int(content["port"]), str(content["secret"]))
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, PeerError):
            raise
        raise PeerError(f"{path}: holds no address of the rendezvous: {error!r}: remove it") from None


def forget_meeting() -> None:
    """Remove the file, if this process is the rank 0 that wrote it: all ranks have met, or it ends."""
    path = os.environ.pop(MEETING, None)
    if path is not None:
        with suppress(OSError):
            os.unlink(path)


def _read(path: Path) -> str | None:
    """None as long as it does not exist."""
    try:
        os.listdir(
            path.parent
        )  # or a client of NFS would go on for a while to say that there is no such file
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise PeerError(f"{path}: cannot be read: {error.strerror}") from None
    with open(descriptor, encoding="utf-8", errors="replace") as file:
        found = os.fstat(descriptor)
        theirs = found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077
        if not stat.S_ISREG(found.st_mode) or (theirs and SECRET not in os.environ):
            raise PeerError(
                f"{path}: was written by another user, or others may read it: remove it and give a log_directory of "
                f"your own, or the same {SECRET} to every rank"
            )
        return file.read(MOST)
