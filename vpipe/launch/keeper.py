"""The keeper: a process that does nothing but outlive the launcher.

The kernel kills the ranks when the launcher dies, but not what the ranks have started. The keeper holds the reading
end of a pipe; the launcher writes the ranks' process groups into it, and nobody else has the writing end. When the
pipe ends, so has the launcher, and the keeper kills whatever is left in those groups.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_DONE = b"done"


@contextmanager
def keeper() -> Iterator[Callable[[int], None]]:
    """Yields what tells the keeper that a process group is to end with the launcher."""
    reading, writing = os.pipe()  # neither is inherited by a program that is started
    child = os.fork()
    if child == 0:
        os.close(writing)
        _keep(reading)

    def tell(group: int) -> None:
        os.write(writing, b"%d\n" % group)

    try:
        yield tell
        os.write(writing, _DONE)  # the groups are gone, their numbers may soon be those of others
    finally:
        os.close(reading)
        os.close(writing)
        os.waitpid(child, 0)


def _keep(reading: int) -> None:
    """The keeper's whole life: system calls only, because it is a copy of who knows what."""
    try:
        os.setsid()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(nowhere, descriptor)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        told = b""
        while part := os.read(reading, 4096):
            told += part
        for group in () if told.endswith(_DONE) else told.split():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(int(group), signal.SIGKILL)
    finally:
        os._exit(0)
