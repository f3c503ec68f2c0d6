"""A pool of worker processes that play the ranks of a torchrun job, one task after the other.

A new process that imports torch costs seconds, so a server process imports everything once and forks
the workers from there: a worker that was killed is replaced in no time.

    test ── (function, arguments, environment) ──▶ worker 0 as rank 0
         ├────────────────────────────────────────▶ worker 1 as rank 1
         ◀── what it returned, or how it failed ───  each

Whoever does not answer in time is killed. Workers lead process groups of their own, so that what they
started dies with them, and they die with the tests, however those end.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import torch
import torch.distributed as dist

from tests.server import server_context
from tests.waiting import TIMEOUT
from vpipe.system.environment import LISTENER

TO_LEAVE = 20.0
"""Seconds after which a worker that was asked to end is killed."""


@dataclass(frozen=True)
class Outcome:
    """What became of a task on one rank; `error` is the class of the exception, or how the worker ended."""

    rank: int
    seconds: float
    value: Any = None
    error: str | None = None
    text: str = ""
    traceback: str = ""


class TaskFailedError(AssertionError):
    """Some rank of a task that was to succeed did not."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        failed = [outcome for outcome in outcomes if outcome.error is not None]
        # A rank that only heard of the failure comes after the one whose fault it is.
        failed.sort(key=lambda outcome: outcome.error == "PeerError")
        super().__init__(
            "\n".join(f"rank {o.rank}: {o.error}: {o.text}\n{o.traceback}".rstrip() for o in failed)
        )


class _Worker:
    """One process, and the connection on which it takes tasks."""

    def __init__(self, context: Any) -> None:
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        if not self.connection.poll(TIMEOUT):
            self.kill()
            raise RuntimeError(f"a worker did not start within {TIMEOUT:g} s")
        self.connection.recv_bytes()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.process.close()
        self.connection.close()


class Pool:
    def __init__(self, *, forked: bool = True) -> None:
        """Workers are forked from the server, or each is a new process: CUDA does not survive a fork."""
        self._context = server_context() if forked else multiprocessing.get_context("spawn")
        if forked:
            forkserver.ensure_running()  # it imports while the tests do something else
        self._workers: list[_Worker] = []

    def run(
        self, ranks: int, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT, **kwargs: Any
    ) -> list[Any]:
        """What the function returns on each rank; it must succeed on all of them."""
        outcomes = self.outcomes(ranks, function, *args, timeout=timeout, **kwargs)
        if any(outcome.error is not None for outcome in outcomes):
            raise TaskFailedError(outcomes)
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self, ranks: int, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT, **kwargs: Any
    ) -> list[Outcome]:
        """What became of the function on each rank. It is found by its name, so it stands in a module."""
        while len(self._workers) < ranks:
            self._workers.append(_Worker(self._context))
        workers = self._workers[:ranks]
        done: dict[int, Outcome] = {}
        try:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                port = listener.getsockname()[1]
                for rank, worker in enumerate(workers):
                    task = (function, args, kwargs, _environment(rank, ranks, port))
                    worker.connection.send_bytes(pickle.dumps(task))
                first = workers[0]
                send_handle(first.connection, listener.fileno(), first.process.pid)
            for rank, outcome in self._collect(workers, timeout):
                done[rank] = outcome
        finally:
            # Also when the test itself is being stopped: nobody stays behind with half a task.
            for worker in (w for rank, w in enumerate(workers) if rank not in done or _ended(done[rank])):
                self._workers.remove(worker)
                worker.kill()
        return [done[rank] for rank in range(ranks)]

    def close(self) -> None:
        """The workers may leave: what measures the lines that they reached writes them down then."""
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            worker.process.join(TO_LEAVE)
            worker.kill()
        self._workers.clear()

    @staticmethod
    def _collect(workers: Sequence[_Worker], timeout: float) -> Iterator[tuple[int, Outcome]]:
        started = time.monotonic()
        pending: dict[Any, int] = {worker.connection: rank for rank, worker in enumerate(workers)}
        while pending:
            left = started + timeout - time.monotonic()
            ready = wait(list(pending), max(0.0, left))
            seconds = time.monotonic() - started
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = pending.pop(connection)
                try:
                    answer = pickle.loads(connection.recv_bytes())
                    yield rank, Outcome(rank, seconds, *answer)
                except (EOFError, OSError):
                    yield rank, Outcome(rank, seconds, None, "Killed", "the process ended within the task")
            if left <= 0:
                for rank in pending.values():
                    yield rank, Outcome(rank, seconds, None, "Hung", f"no answer within {timeout:g} s")
                return


def _ended(outcome: Outcome) -> bool:
    return outcome.error in ("Killed", "Hung")


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun would set."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _serve(connection: Connection) -> None:
    """The life of a worker: one task after the other until the tests hang up."""
    os.setpgid(0, 0)
    threading.Thread(target=_die_with_the_tests, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    connection.send_bytes(b"ready")
    while True:
        try:
            function, args, kwargs, environment = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        os.environ.update(environment)
        if environment["RANK"] == "0":
            os.environ[LISTENER] = str(
                recv_handle(connection)
            )  # as our launcher would: the port is nobody else's
        # Pickled here and not by the connection, which would move tensors by shared memory.
        answer = pickle.dumps(_answer(function, args, kwargs))
        if LISTENER in os.environ:
            os.close(int(os.environ.pop(LISTENER)))  # a task that did not join
        connection.send_bytes(answer)


def _die_with_the_tests() -> None:
    """However they end, and whatever the task is doing."""
    tests = multiprocessing.parent_process()
    assert tests is not None
    wait([tests.sentinel])
    os.killpg(0, signal.SIGKILL)


def _answer(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, str | None, str, str]:
    try:
        return function(*args, **kwargs), None, "", ""
    except BaseException as error:
        return None, type(error).__name__, str(error), traceback.format_exc()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
