"""The worker processes of one system: started once, given what to build, run and close, always ended."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import socket
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import systems
from systems import Schedule

WORLD = 2
CONTEXT = multiprocessing.get_context("forkserver")
# Imported once, not by every worker: torch, and what its optimizers import when the first one is made.
CONTEXT.set_forkserver_preload(["torch", "torch._dynamo"])


class WorkerError(RuntimeError):
    """A worker failed, ended or did not answer in time; the pool is of no further use."""


class Timing(NamedTuple):
    """One measured run: its speed from the first rank's start to the last rank's end, its last loss, and the
    share of that time that the ranks had a processor."""

    samples_per_s: float
    loss: float
    on_processor: float


class RankTiming(NamedTuple):
    """What one rank tells of a run. Start and end are on a clock that all processes share."""

    start: float
    end: float
    processor: float  # seconds
    samples: int
    loss_part: float


class Pool:
    """The worker processes of one system. Use it in a `with`: they end with it, whatever happens."""

    def __init__(self, system: str, timeout: float) -> None:
        self.system = system
        self.timeout = timeout
        port = free_port()
        self.connections: list[Connection] = []
        self.processes = []
        for rank in range(WORLD):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=serve, args=(theirs, system, rank, port, timeout), daemon=True)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            # A worker leads a process group: what it has started ends with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
        for process, connection in zip(self.processes, self.connections, strict=True):
            process.join()
            connection.close()

    def schedules(self) -> tuple[Schedule, ...] | str:
        """The system's schedules, or the reason why it cannot run here. To ask first, once."""
        return self._answers()[0]

    def build(self, schedule: str, minibatches: int) -> None:
        """Make a runner on every rank, known by these two from now on."""
        self._ask("build", schedule, minibatches)

    def run(self, schedule: str, minibatches: int, steps: int) -> Timing:
        """Run steps on every rank, all starting from a barrier."""
        ranks: list[RankTiming] = self._ask("run", schedule, minibatches, steps)
        seconds = max(rank.end for rank in ranks) - min(rank.start for rank in ranks)
        on_processor = sum(rank.processor for rank in ranks) / (WORLD * seconds)
        return Timing(ranks[0].samples / seconds, sum(rank.loss_part for rank in ranks), on_processor)

    def close(self, schedule: str, minibatches: int) -> None:
        """Let a runner go."""
        self._ask("close", schedule, minibatches)

    def _ask(self, *request: Any) -> list[Any]:
        for connection in self.connections:
            connection.send(request)
        return self._answers()

    def _answers(self) -> list[Any]:
        """One answer a rank. The first failure counts: the other ranks may be waiting for that one."""
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + self.timeout
        while len(answers) < WORLD:
            missing = [rank for rank in range(WORLD) if rank not in answers]
            ready = wait([self.connections[rank] for rank in missing], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise WorkerError(f"ranks {missing} gave no answer in {self.timeout:.0f} s")
            for rank in missing:
                if self.connections[rank] in ready:
                    answers[rank] = self._answer(rank)
        return [answers[rank] for rank in range(WORLD)]

    def _answer(self, rank: int) -> Any:
        try:
            done, answer = self.connections[rank].recv()
        except (EOFError, ConnectionError):
            self.processes[rank].join(1)  # its exit code comes a little after its connection's end
            raise WorkerError(f"rank {rank} ended (exit code {self.processes[rank].exitcode})") from None
        if not done:
            raise WorkerError(f"rank {rank}: {answer}")
        return answer


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def serve(connection: Connection, system: str, rank: int, port: int, timeout: float) -> None:
    """What a worker process runs: one answer a request, until the pool ends it."""
    os.setpgid(0, 0)
    os.dup2(2, 1)  # standard output is the report's alone
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle
    worker = Worker(rank)
    try:
        connection.send((True, worker.start(system, port, timeout)))
        while True:
            action, *arguments = connection.recv()
            connection.send((True, getattr(worker, action)(*arguments)))
    except EOFError:
        pass  # the parent is gone
    except Exception:
        connection.send((False, traceback.format_exc(limit=-3).strip()))


class Worker:
    """One rank of a system, with the runners that it has built."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.runners: dict[tuple[str, int], systems.Runner] = {}

    def start(self, system: str, port: int, timeout: float) -> tuple[Schedule, ...] | str:
        """Join the process group and load the system: its schedules, or why it cannot run."""
        os.environ.update(
            OMP_NUM_THREADS="1",
            GLOO_SOCKET_IFNAME="lo",
            RANK=str(self.rank),
            LOCAL_RANK=str(self.rank),
            WORLD_SIZE=str(WORLD),
            LOCAL_WORLD_SIZE=str(WORLD),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        # The parent reads this module too, and has no need of torch.
        import torch
        import work
        from torch import distributed

        torch.set_num_threads(1)
        distributed.init_process_group("gloo", timeout=timedelta(seconds=timeout))
        self.barrier, self.minibatch = distributed.barrier, work.MINIBATCH
        try:
            self.system = systems.load(system)
        except ModuleNotFoundError as error:
            return f"not installed: {error}"
        return self.system.schedules

    def build(self, schedule: str, minibatches: int) -> None:
        self.runners[schedule, minibatches] = self.system.build(self.rank, WORLD, minibatches, schedule)

    def run(self, schedule: str, minibatches: int, steps: int) -> RankTiming:
        runner = self.runners[schedule, minibatches]
        gc.collect()  # what others left behind is not this one's to pay for
        self.barrier()
        start, processor = time.clock_gettime(time.CLOCK_MONOTONIC), time.process_time()
        part = runner.run(steps)
        end, processor = time.clock_gettime(time.CLOCK_MONOTONIC), time.process_time() - processor
        return RankTiming(start, end, processor, steps * minibatches * self.minibatch, part)

    def close(self, schedule: str, minibatches: int) -> None:
        self.runners.pop((schedule, minibatches)).close()
