"""The ranks of one host as child processes: started together, watched, and ended together.

The children are given torchrun's environment, so that a rank does not know who started it. The first of
them that fails ends the run: the others would wait for it for ever. Whatever happens here, no child stays.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from vpipe.environment import LISTENER, SECRET
from vpipe.errors import ConfigError, VPipeError

LAUNCHED = "VPIPE_RUN_FOLDER"
"""Set for a child: the folder of its run."""
LAUNCHER = "VPIPE_LAUNCHER"
"""Set for a child: the process that started it."""
PEER_FAILED = 3
"""The exit code of a child that ends because another one failed."""
GRACE = 5.0
"""Seconds that a child has to end by itself."""
POLL = 0.05
TAIL = 20  # lines of a log that are shown when a rank dies


def run_ranks_here(
    arguments: Sequence[str],
    ranks: int,
    folder: Path,
    *,
    port: int = 0,
    directory: Path | None = None,
    interpreter: Sequence[str] = (sys.executable,),
    quiet: bool = False,
) -> None:
    """Run `vpipe` with these arguments on every rank; raises what the first failing one says."""
    command = [*interpreter, "-m", "vpipe", *arguments]
    children: list[subprocess.Popen[bytes]] = []
    with _ended_in_the_end(children), ExitStack() as files:
        listener = files.enter_context(listen_here(port))
        environment = _environment(ranks, folder, listener.getsockname()[1])
        for rank in range(ranks):
            log = files.enter_context(open(folder / f"output.log.{rank}", "ab"))
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            if rank == 0:
                own[LISTENER] = str(listener.fileno())
            children.append(
                subprocess.Popen(
                    command,
                    env=environment | own,
                    cwd=directory,
                    pass_fds=() if rank else (listener.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=log if rank or quiet else None,  # the first rank talks to the user
                    stderr=log,
                )
            )
        listener.close()  # it is rank 0's now, and ends with it
        _wait(children)
    codes = [child.returncode for child in children]
    if any(codes):
        raise _failure(codes, folder)


def listen_here(port: int) -> socket.socket:
    """A socket of the loopback interface, for the ranks to meet at: from now on the port is this job's."""
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise ConfigError(
            f"port is {port}: it cannot be used ({error.strerror}): another job or program has it; give another, "
            "or 0 for any"
        ) from None


def _environment(ranks: int, folder: Path, port: int) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "OMP_NUM_THREADS": str(max(1, cores // ranks)),
        **os.environ,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        SECRET: secrets.token_hex(32),
        LAUNCHED: str(folder.absolute()),
        LAUNCHER: str(os.getpid()),
    }


def _wait(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Until all have ended well, or one has failed and the others had time to notice it."""
    deadline = None
    while any(child.poll() is None for child in children):
        if deadline is None and any(child.poll() for child in children):
            deadline = time.monotonic() + GRACE
        if deadline is not None and time.monotonic() > deadline:
            return
        time.sleep(POLL)


@contextmanager
def _ended_in_the_end(children: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Whether we leave by an error, by Ctrl-C or by a signal: the children are ended and waited for."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for child in children:
            if child.poll() is None:
                child.terminate()
        deadline = time.monotonic() + GRACE
        for child in children:
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def _failure(codes: Sequence[int], folder: Path) -> VPipeError:
    """What the rank that failed by itself said; the others only noticed."""
    own = [rank for rank, code in enumerate(codes) if code not in (0, PEER_FAILED, -signal.SIGTERM)]
    rank = own[0] if own else next(rank for rank, code in enumerate(codes) if code)
    code = codes[rank]
    log = folder / f"output.log.{rank}"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    said = [line for line in lines if line.startswith("error: ")]
    if code in (2, PEER_FAILED) and said:
        return VPipeError(said[-1].removeprefix("error: "))
    ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    tail = "\n".join(f"  | {line}" for line in lines[-TAIL:])
    return VPipeError(f"rank {rank} {ended}; the end of {log}:\n{tail}")
