"""The command line in a process that need not import anything: forked, and so are the ranks that it launches.

A new interpreter spends seconds on torch and transformers before the command begins, and every rank spends them
again. The server behind the worker pool has them ready:

    tests ──▶ server, all imported ──fork──▶ `vpipe train` ──fork──▶ rank 0
                                                           └─fork──▶ rank 1

All else is as with new interpreters: a session, an environment and files of its own, signals, exit codes. Only
/proc tells arguments and environment of the server; a rank's name there is `rank N`.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NoReturn

from tests.server import server_context
from vpipe.system.environment import LISTENER


class Forked:
    """A running command; what `subprocess.Popen` tells of one, except that its output comes in the end."""

    def __init__(
        self,
        arguments: Sequence[str],
        cwd: Path,
        environment: dict[str, str],
        listener: socket.socket | None = None,
        prepare: Callable[[], None] | None = None,
        said: Sequence[str] = (),
    ) -> None:
        """`listener` is for a rank that nobody launches to inherit; `prepare` is called in the process, first.

        `said` are the files for its output and its errors, if not some of our own.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="vpipe-said-")
        self._said = list(said) or [str(Path(self._folder.name, name)) for name in ("out", "err")]
        begin = (list(arguments), str(cwd), environment, self._said, listener, prepare)
        self._process = server_context().Process(target=_command, args=begin)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("vpipe", timeout or 0.0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Standard output and error, once it has ended."""
        self.wait(timeout)
        out, err = (Path(file).read_text(errors="replace") for file in self._said)
        return out, err


def _command(
    arguments: list[str],
    cwd: str,
    environment: dict[str, str],
    said: Sequence[str],
    listener: socket.socket | None,
    prepare: Callable[[], None] | None,
) -> None:
    """What the forked process does: `python -m vpipe`, after its imports."""
    os.setsid()
    if prepare is not None:
        prepare()
    if listener is not None:
        environment = environment | {LISTENER: str(listener.detach())}
    for number, file in enumerate(said, 1):
        os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
    subprocess.Popen = ForkedRank  # type: ignore[misc]
    _begin(arguments, cwd, environment)


def _begin(arguments: Sequence[str], cwd: Any, environment: dict[str, str]) -> None:
    from vpipe.cli import main

    if cwd is not None:
        os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["vpipe", *arguments]
    main()


class ForkedRank(subprocess.Popen):  # type: ignore[type-arg]
    """Forks where the launcher starts `python -m vpipe`; anything else is started as ever."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        if list(args[:3]) != [sys.executable, "-m", "vpipe"]:
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        _, prepare, _, kept, cwd, environment = rest[:6]
        pipes, own_session, group = rest[9:15], rest[20], [*rest[21:], -1][0]
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            streams = (pipes[0], pipes[3], pipes[5])  # what it reads, writes, and complains to
            if own_session:
                os.setsid()
            elif group >= 0:
                os.setpgid(0, group)
            _exit_with(lambda: _rank(args[3:], prepare, kept, cwd, environment, streams))
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _rank(
    arguments: Sequence[str],
    prepare: Callable[[], None] | None,
    kept: Sequence[int],
    cwd: Any,
    environment: dict[str, str] | None,
    streams: Sequence[int],
) -> None:
    """Leave behind what an exec would leave behind, and be a rank."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):  # the launcher's own
            own = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, own)
    for number, descriptor in enumerate(streams):
        if descriptor >= 0:
            os.dup2(descriptor, number)
    _close_all_but(kept)
    resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]
    if prepare is not None:
        prepare()
    environment = dict(os.environ) if environment is None else environment
    Path("/proc/self/comm").write_text(f"rank {environment.get('RANK')}")
    _begin(arguments, cwd, environment)


def _close_all_but(kept: Sequence[int]) -> None:
    first = 3
    for descriptor in sorted(kept):
        os.closerange(first, descriptor)
        os.set_inheritable(descriptor, True)
        first = descriptor + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))


def _exit_with(work: Callable[[], None]) -> NoReturn:
    """End as an interpreter does, without what stands above us on the stack."""
    code: Any = 1
    try:
        work()
        code = 0
    except SystemExit as leaving:
        code = leaving.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code if isinstance(code, int) else 1)
