"""Writing beside the training: a full disk, a folder that is gone or a closed pipe costs what would have been written,
never the training.

What fails is counted, and the first failure is reported. Files that the user must not lose (checkpoints, the exported
model, the summary) are not written this way: they raise `NotWrittenError`.
"""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from vpipe.errors import NotWrittenError, printable


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class BestEffort:
    """The count of the writes that have failed, for one rank or launcher."""

    def __init__(self, warn: Callable[[str], object] = _to_stderr) -> None:
        self.failed = 0
        self.first: str | None = None
        self._warn = warn
        self._counting = threading.Lock()

    @contextmanager
    def writing(self, what: object) -> Iterator[None]:
        """Count it if the file `what` cannot be written in here, and go on."""
        try:
            yield
        except NotWrittenError as error:
            self.lost(str(error))
        except OSError as error:
            self.lost(f"{what}: cannot be written: {error.strerror or error}")

    def lost(self, how: str) -> None:
        with self._counting:
            self.failed += 1
            if self.first is not None:
                return
            self.first = how
        self._warn(f"WARNING: {how}: the run goes on without it, and only counts further writes that fail")


class LogFile:
    """A file that lines or records are added to; what cannot be written as a whole is not written."""

    def __init__(self, path: Path, effort: BestEffort | None = None) -> None:
        self.path = path
        self._effort = effort or BestEffort()
        self._descriptor: int | None = None
        self._lock = threading.RLock()

    def line(self, text: str) -> None:
        self.append((printable(text, lines=True) + "\n").encode())

    def append(self, data: bytes) -> None:
        with self._effort.writing(self.path), self._lock:
            self._write(data, self._open())

    @property
    def descriptor(self) -> int | None:
        """For who writes without Python; None if there is no file now."""
        return self._descriptor

    def close(self) -> None:
        with self._effort.writing(self.path), self._lock:
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is not None:
                os.close(descriptor)

    def _open(self) -> int:
        """The file, once more if it could not be opened before or was deleted since."""
        if self._descriptor is not None and not os.fstat(self._descriptor).st_nlink:
            self.close()
        if self._descriptor is None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(self.path, flags, 0o666)
        return self._descriptor

    def _write(self, data: bytes, file: int) -> None:
        written = 0
        try:
            while written < len(data):
                written += os.write(file, data[written:])
        except OSError:
            if written:  # what follows, once there is room again, must not begin in the middle of this
                end = os.lseek(file, 0, os.SEEK_CUR)
                if end == os.fstat(file).st_size:
                    os.ftruncate(file, end - written)
            raise


class _LossyOutput(io.FileIO):
    """Standard output or error whose reader may go away."""

    def __init__(self, descriptor: int, effort: BestEffort) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._effort = effort

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        length = len(rest)
        try:
            while rest:
                rest = rest[super().write(rest) or 0 :]
        except OSError as error:
            # Standard error has nobody left to be told.
            if self.fileno() == 1:
                self._effort.lost(f"standard output: cannot be written: {error.strerror}")
        return length


def survive_lost_output() -> None:
    """From now on this process goes on when its standard output or error cannot be written any more."""
    effort = BestEffort()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        with suppress(OSError, ValueError, AttributeError):  # not a file: somebody captures it
            stream.flush()
            lossy = _LossyOutput(stream.fileno(), effort)
            setattr(
                sys,
                name,
                io.TextIOWrapper(
                    lossy,
                    encoding=stream.encoding,
                    errors="backslashreplace",
                    line_buffering=True,
                ),
            )


def open_closed_streams() -> None:
    """A process that was started without standard input, output or error (`>&-`) gets an empty one: otherwise the
    first files that it opens would take their place."""
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115 (it stays)
