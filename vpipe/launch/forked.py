"""Ranks as forks of their launcher, which has imported torch and captured the model for all of them.

A new interpreter spends seconds on these imports, and each rank would spend them again. The memory of the modules is
shared too. A process that has threads or has touched a GPU cannot be forked: then each rank is a new interpreter.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

GPU_FILES = "/dev/nvidia"
HARMLESS = {"jemalloc_bg_thd"}
"""Threads of libraries that start them again in a fork: jemalloc's, which pyarrow brings along."""


def can_fork() -> bool:
    """Whether forks of this process can compute: there is one thread, and no library has opened a GPU."""
    with suppress(OSError):
        files = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
        threads = [Path(entry, "comm").read_text().strip() for entry in Path("/proc/self/task").iterdir()]
        alone = len([name for name in threads if name not in HARMLESS]) == 1
        return alone and not any(file.startswith(GPU_FILES) for file in files)
    return False


@dataclass(frozen=True)
class RankStart:
    """What the process of a rank begins with; its input is empty."""

    arguments: Sequence[str]
    """Of `vpipe`."""
    environment: Mapping[str, str]
    directory: Path | None
    stdout: int | None
    """None: ours."""
    stderr: int
    kept: Sequence[int]
    """Other descriptors that it inherits."""


class ForkedRank:
    """`python -m vpipe` in a fork of this process; what `subprocess.Popen` tells of a process."""

    def __init__(self, start: RankStart) -> None:
        self.returncode: int | None = None
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()  # else the fork would write it again
        # A signal for the fork waits until it has the handlers of a rank.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self.pid = os.fork()
        if self.pid == 0:
            _exit_with(lambda: _become_rank(start, mask))
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self) -> int | None:
        return self._reap(0)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _reap(self, how: int) -> int | None:
        if self.returncode is None:
            process, status = os.waitpid(self.pid, how)
            if process:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def _become_rank(start: RankStart, mask: Iterable[int]) -> None:
    """Leave behind what a new program would leave behind, and run the command."""
    os.setsid()
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):  # the launcher's own
            plain = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, plain)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(1 if start.stdout is None else start.stdout, 1)
    os.dup2(start.stderr, 2)
    first = 3
    for descriptor in sorted(start.kept):
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(start.environment)
    if start.directory is not None:
        os.chdir(start.directory)
    Path("/proc/self/comm").write_text(f"rank {start.environment['RANK']}")  # its name in `ps` and `top`
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    sys.argv = ["vpipe", *start.arguments]
    _command()


def _command() -> None:
    import_module("vpipe.cli").main()  # by its name: the command line stands above


def _exit_with(work: Callable[[], None]) -> NoReturn:
    """End as an interpreter does, without what stands above us on the stack."""
    code: Any = 1
    try:
        try:
            work()
            code = 0
        except SystemExit as leaving:
            code = leaving.code or 0
        except BaseException:
            traceback.print_exc()
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
    finally:  # whatever happens: the caller is another process
        os._exit(code if isinstance(code, int) else 1)
