"""The ranks of several hosts: an agent on each host starts and watches its own, the launcher decides.

    launcher                                             agent of each host (`train/host.py`)
                           ◀────────────────  hello      versions, clock, GPUs
    job     ─────────────▶                               config and files, ranks, folder
                           ◀────────────────  ready
    listen  ─────────────▶  rank 0's host     listening  the address where the ranks meet
    reach   ─────────────▶  the other hosts   reached
    start   ─────────────▶                               with the secret of the job
                           ◀────────────────  out, log, training, failed, file
    end, save, verdict ──▶                               signals; the rank that failed, on whatever host
                           ◀────────────────  ended      exit codes

Both ends send heartbeats. An agent that hears nothing for the heartbeat limit, or whose wire ends, kills its ranks.
"""

from __future__ import annotations

import codecs
import os
import re
import secrets
import sys
import time
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vpipe.errors import ConfigError, RankFailedError, VPipeError, printable
from vpipe.launch.agents import (
    Agent,
    ask,
    greet,
    raise_first,
    skewed,
    started_agents,
    take_errors,
    warn,
)
from vpipe.launch.hosts import Host
from vpipe.launch.local import GRACE, POLL, RanksEnded, conclude
from vpipe.launch.signals import LauncherSignals, handling_signals
from vpipe.launch.watch import KINDS, FailedRank, FailureLog
from vpipe.record.run_folder import log_path
from vpipe.system.best_effort import LogFile
from vpipe.system.environment import SECRET

PASSED_ON = (
    "VPIPE_",
    "OMP_",
    "MKL_",
    "NCCL_",
    "TORCH",
    "PYTORCH_",
    "HF_",
    "TRANSFORMERS_",
    "WANDB_",
    "MLFLOW_",
)
"""Beginnings of the names of variables that the ranks of other hosts get from the launcher's environment."""
END_LIMIT = GRACE + 2.0
"""Seconds that the hosts have to end their ranks, once one has failed or a second signal has come."""
AGAIN = 1.0
"""Seconds between two attempts to reach a host that was lost."""
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class HostsJob:
    """What is to run on several hosts."""

    hosts: Sequence[Host]
    python: str
    facts: Mapping[str, Any]
    """The launcher's own, which the hosts must have too."""
    order: Mapping[str, Any]
    """The job as the agents read it, without what differs from host to host."""
    folder: Path
    port: int
    stages: Sequence[str]
    heartbeat_limit: float
    rendezvous_limit: float
    quiet: bool = False


@dataclass
class _HostsRun:
    """A run while its ranks run."""

    job: HostsJob
    agents: Sequence[Agent]
    signals: LauncherSignals
    log: FailureLog
    attempt: int
    failed: FailedRank | None = None
    found: float = 0.0
    training: set[str] = field(default_factory=set)
    logs: dict[int, LogFile] = field(default_factory=dict)
    decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def blame(self, failed: FailedRank, by: Agent | None = None) -> None:
        """The first rank that failed, or whose host is lost; the agents of the other hosts get it."""
        if self.failed is not None:
            return
        self.failed, self.found = failed, self.log.now()
        for agent in self.agents:
            if agent is not by:
                agent.wire.send(verdict=[failed.rank, failed.how])

    def handle(self, agent: Agent, message: dict[str, Any]) -> None:
        if "out" in message and not self.job.quiet:
            sys.stdout.write(self.decoder.decode(message["out"].encode("latin-1")))
            sys.stdout.flush()
        if "log" in message:
            rank, text = message["log"]
            if rank not in self.logs:
                self.logs[rank] = LogFile(log_path(self.job.folder, int(rank)), self.log.effort)
            self.logs[rank].append(text.encode("latin-1"))
        if "file" in message and _FILE.fullmatch(message["file"][0]):
            name, content = message["file"]
            with self.log.effort.writing(name):
                part = self.job.folder / f".{name}"
                part.write_bytes(b64decode(content))
                part.rename(self.job.folder / name)  # a reader finds all of it, or what was there before
        if "training" in message:
            self.training.add(agent.host.name)
            if len(self.training) == len(self.agents) and self.attempt:
                self.log.recovered(self.attempt)
        if "failed" in message:
            rank, how, code = message["failed"]
            self.blame(FailedRank(rank, how, KINDS.get(code, RankFailedError)), agent)
        if "ended" in message:
            agent.ended = message["ended"]

    def look(self) -> None:
        for agent in self.agents:
            for message in agent.wire.receive():
                self.handle(agent, message)
            for line in take_errors(agent).splitlines():
                shown = line if agent.host.here else f"{agent.host.name}: {line}"
                print(printable(shown), file=sys.stderr, flush=True)
            if agent.ended is not None:
                continue
            silence = agent.wire.silence(self.job.heartbeat_limit)
            if agent.wire.ended:
                self._lose(agent, "the connection to it ended")
            elif silence > self.job.heartbeat_limit:
                self._lose(
                    agent,
                    f"nothing was heard from it for {silence:.1f} s: it is stopped, or the network is cut",
                )

    def _lose(self, agent: Agent, how: str) -> None:
        """A host that says nothing more: nobody waits for it, and if nothing has failed yet, it has."""
        rank, others = agent.host.ranks[0], len(agent.host.ranks) - 1
        more = f" and of {others} more ranks" if others else ""
        agent.ended = {"codes": {}, "error": ""}
        where = f"host {agent.host.name}, of {self.job.stages[rank]}{more}, is lost"
        self.blame(FailedRank(rank, f"{where}: {how}"), agent)

    def wait(self) -> None:
        """Until all have ended; for a limited time once a rank has failed, or a second signal to end has come."""
        passed_on = saves = 0
        deadline: float | None = None
        while any(agent.ended is None for agent in self.agents):
            self.look()
            for _ in range(passed_on, len(self.signals.to_end)):
                self._send(end=True)
            for _ in range(saves, self.signals.to_save):
                self._send(save=True)
            passed_on, saves = len(self.signals.to_end), self.signals.to_save
            if deadline is None and (self.failed is not None or passed_on > 1):
                deadline = time.monotonic() + END_LIMIT
            if deadline is not None and time.monotonic() > deadline:
                break
            time.sleep(POLL)
        self.look()
        for log in self.logs.values():
            log.close()

    def _send(self, **message: Any) -> None:
        for agent in self.agents:
            agent.wire.send(**message)

    def ended(self) -> RanksEnded:
        codes: dict[int, int | None] = {rank: None for host in self.job.hosts for rank in host.ranks}
        error: VPipeError | None = None
        for agent in self.agents:
            if agent.ended is not None:
                codes |= {int(rank): code for rank, code in agent.ended["codes"].items()}
        failed = self.failed
        if failed is not None:
            verdict = f"rank {failed.rank} failed: {failed.how}".partition("\n")[0]
            texts = (a.ended["error"] for a in self.agents if a.ended and failed.rank in a.host.ranks)
            text = next(filter(None, texts), verdict)
            host = next(agent.host for agent in self.agents if failed.rank in agent.host.ranks)
            if failed.kind is not RankFailedError and not host.here:
                text = f"{host.name}: {text}"  # a mistake that it may be alone with
            error = failed.kind(*text.split("\n", 1))
        return RanksEnded(codes, failed, error, self.found or self.log.now())


def run_ranks_on_hosts(job: HostsJob, attempt: int, log: FailureLog) -> list[str]:
    """Run the ranks of all hosts to their end, like `run_ranks_here`; the hosts that have a folder of their own."""
    with handling_signals() as signals, _reached(job, signals, attempt) as agents:
        apart = _start(job, agents, signals, attempt)
        run = _HostsRun(job, agents, signals, log, attempt)
        run.wait()
        ended = run.ended()
    conclude(ended, signals, attempt, log)
    return apart


@contextmanager
def _reached(job: HostsJob, signals: LauncherSignals, attempt: int) -> Iterator[Sequence[Agent]]:
    """The agents of all hosts. For a restart, a host that was lost is tried again for a while."""
    deadline = time.monotonic() + (job.rendezvous_limit if attempt else 0.0)
    while True:
        with ExitStack() as stack:
            agents = stack.enter_context(started_agents(job.hosts, job.python, job.heartbeat_limit))
            wrong = greet(agents, signals, job.facts)
            if not wrong or time.monotonic() > deadline:
                raise_first(wrong, RankFailedError if attempt else ConfigError)
                yield agents
                return
        time.sleep(AGAIN)


def _start(job: HostsJob, agents: Sequence[Agent], signals: LauncherSignals, attempt: int) -> list[str]:
    """Let all agents start their ranks; the hosts that do not see the launcher's folder."""
    names: dict[str, str] = {}
    for agent in agents:
        name, other = agent.host.name, names.setdefault(agent.facts["host"], agent.host.name)
        if other != name:
            raise ConfigError(
                f"machines names one host as {other!r} and as {name!r}: write one of them everywhere"
            )
        if attempt == 0 and (line := skewed(agent)):
            warn(f"{name}: {line}")
    token = secrets.token_hex(16)
    marker = job.folder / f".hosts-{token}"
    with _seen(marker):
        environment = {name: os.environ[name] for name in os.environ if name.startswith(PASSED_ON)}
        environment.pop(SECRET, None)
        common = dict(job.order) | {"marker": marker.name, "attempt": attempt, "environment": environment}
        ready = ask(agents, signals, "ready", lambda agent: {"job": common | {"ranks": agent.host.ranks}})
    first, *others = agents
    candidates = [first.host.name, *addresses_by_ssh(first, others)]
    where = ask([first], signals, "listening", lambda agent: {"listen": [candidates, job.port]})
    address, port = where[first.host.name]
    ask(others, signals, "reached", lambda agent: {"reach": [address, port]})
    secret = secrets.token_hex(32)
    for agent in agents:
        agent.wire.send(start=[address, port, secret])
    return [name for name, shares in ready.items() if not shares]


@contextmanager
def _seen(marker: Path) -> Iterator[None]:
    """A file by which agents find out whether they share the folder."""
    with suppress(OSError):
        marker.touch()
    try:
        yield
    finally:
        with suppress(OSError):
            marker.unlink()


def addresses_by_ssh(first: Agent, others: Sequence[Agent]) -> list[str]:
    """Addresses of the first host that ssh connections have used: SSH_CONNECTION is client, port, server, port."""
    if first.host.here:
        return [agent.facts["ssh"][0] for agent in others if agent.facts["ssh"]]
    return list(first.facts["ssh"][2:3])
