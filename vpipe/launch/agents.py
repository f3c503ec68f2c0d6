"""The agents of a run's hosts, as the launcher sees them: started here or by ssh, heard, and ended together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from vpipe.errors import ConfigError, RankFailedError, printable
from vpipe.launch.hosts import Host
from vpipe.launch.local import POLL
from vpipe.launch.signals import LauncherSignals
from vpipe.launch.ssh import ssh_command, why_not
from vpipe.launch.wire import Wire

MODULE = "vpipe.train.host"
"""The program of an agent."""
START_LIMIT = 60.0
"""Seconds within which an agent must begin: Python starts, from a slow disk perhaps."""
ANSWER_LIMIT = 60.0
"""Seconds that an agent has for an answer."""
LEAVE_LIMIT = 2.0
"""Seconds that an agent has to leave when nothing is left to do."""
CLOCK_LIMIT = 5.0
"""Seconds that the clocks of two hosts may differ before somebody is warned."""
VERSIONS = {
    "vpipe": "vpipe {} and here {}: install the same version on both",
    "source": "vpipe of the same version with other code: install the same one on both",
    "torch": "torch {} and here {}: install the same version on both",
    "python": "Python {} and here {}: use the same version on both",
}


@dataclass
class Agent:
    host: Host
    process: subprocess.Popen[bytes]
    wire: Wire
    errors: int
    """The descriptor of its standard error."""
    said: str = ""
    """The end of what it wrote there."""
    facts: dict[str, Any] = field(default_factory=dict)
    skew: float = 0.0
    """Seconds that its clock is ahead of ours."""
    ended: dict[str, Any] | None = None
    """Its last message: exit codes, and the error of a rank that failed."""

    def __str__(self) -> str:
        return "this host" if self.host.here else self.host.name


@contextmanager
def started_agents(hosts: Sequence[Host], python: str, limit: float) -> Iterator[list[Agent]]:
    """An agent on each host, of which none is left here when we leave; those of other hosts see the end of the wire."""
    agents: list[Agent] = []
    try:
        for host in hosts:
            own = [sys.executable if host.here else python, "-m", MODULE]
            # A session of its own: a Ctrl-C of the terminal is for the launcher, which passes it on.
            process = subprocess.Popen(
                own if host.here else ssh_command(host.name, own),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stderr is not None
            os.set_blocking(process.stderr.fileno(), False)
            wire = Wire(os.dup(process.stdout.fileno()), os.dup(process.stdin.fileno()))
            process.stdin.close()
            process.stdout.close()
            agents.append(Agent(host, process, wire, process.stderr.fileno()))
            wire.start_heartbeat(limit)
        yield agents
    finally:
        for agent in agents:
            agent.wire.close()
        deadline = time.monotonic() + LEAVE_LIMIT
        for agent in agents:
            with suppress(subprocess.TimeoutExpired):
                agent.process.wait(max(0.0, deadline - time.monotonic()))
            with suppress(ProcessLookupError):
                os.killpg(agent.process.pid, signal.SIGKILL)
            agent.process.wait()


def take_errors(agent: Agent) -> str:
    """What the agent, or ssh, has written to standard error since."""
    taken = b""
    with suppress(OSError):  # nothing, or closed
        while part := os.read(agent.errors, 65536):
            taken += part
    text = taken.decode(errors="replace")
    agent.said = (agent.said + text)[-4096:]
    return text


def greet(agents: Sequence[Agent], signals: LauncherSignals, mine: Mapping[str, Any]) -> dict[str, str]:
    """Wait for the facts of each agent; by host's name what is wrong with it, in one line."""
    wrong: dict[str, str] = {}
    deadline = time.monotonic() + START_LIMIT

    def look(agent: Agent) -> bool:
        for message in agent.wire.receive():
            if "hello" in message:
                agent.facts = message["hello"]
                agent.skew = agent.facts["time"] - time.time()
        if not agent.facts and (agent.wire.ended or time.monotonic() > deadline):
            late = "" if agent.wire.ended else f"no answer within {START_LIMIT:g} s"
            with suppress(subprocess.TimeoutExpired):
                agent.process.wait(LEAVE_LIMIT)
            take_errors(agent)
            code = agent.process.poll()
            wrong[agent.host.name] = why_not(agent.host.name, _python(agent), code, agent.said or late)
        return bool(agent.facts) or agent.host.name in wrong

    wait_for(agents, signals, look)
    for agent in agents:
        if agent.facts and (differences := compare_versions(agent.facts, mine)):
            wrong[agent.host.name] = f"has {differences[0]}"
    return wrong


def compare_versions(theirs: dict[str, Any], mine: Mapping[str, Any]) -> list[str]:
    different = [key for key in VERSIONS if theirs.get(key) != mine[key]]
    if "vpipe" in different and "source" in different:
        different.remove("source")
    return [VERSIONS[key].format(theirs.get(key), mine[key]) for key in different]


def skewed(agent: Agent) -> str:
    """A line for a clock that differs from ours; empty if it does not."""
    if abs(agent.skew) < CLOCK_LIMIT:
        return ""
    way = "ahead of" if agent.skew > 0 else "behind"
    return (
        f"its clock is {abs(agent.skew):.0f} s {way} this host's: dates in logs do not fit; let NTP set both"
    )


def wait_for(agents: Sequence[Agent], signals: LauncherSignals, look: Callable[[Agent], bool]) -> None:
    """Until `look` is true for each agent. A signal to end ends the launcher: there is nothing to save yet."""
    waiting = list(agents)
    while waiting := [agent for agent in waiting if not look(agent)]:
        if signals.to_end:
            raise SystemExit(128 + signals.to_end[0])
        time.sleep(POLL)


def ask(
    agents: Sequence[Agent],
    signals: LauncherSignals,
    key: str,
    order: Callable[[Agent], dict[str, Any]],
    limit: float = ANSWER_LIMIT,
) -> dict[str, Any]:
    """Send an order and wait for the answers, under this key; by host's name. Raises for a mistake on a host."""
    answers: dict[str, Any] = {}
    mistakes: dict[str, str] = {}
    deadline = time.monotonic() + limit
    for agent in agents:
        agent.wire.send(**order(agent))

    def look(agent: Agent) -> bool:
        name = agent.host.name
        for message in agent.wire.receive():
            if key in message:
                answers[name] = message[key]
            elif "mistake" in message:
                mistakes[name] = message["mistake"]
        if name not in answers and name not in mistakes:
            if agent.wire.ended:
                take_errors(agent)
                raise lost(agent, "its connection ended")
            if time.monotonic() > deadline:
                raise lost(agent, f"it did not answer within {limit:g} s")
        return name in answers or name in mistakes

    wait_for(agents, signals, look)
    raise_first(mistakes, ConfigError)
    return answers


def lost(agent: Agent, how: str) -> RankFailedError:
    last = agent.said.strip().rpartition("\n")[2]
    return RankFailedError(f"{agent} was lost: {how}" + (f" ({last})" if last else ""))


def raise_first(mistakes: dict[str, str], kind: type[ConfigError] | type[RankFailedError]) -> None:
    """One line, for the first host; the others are counted."""
    for host, text in mistakes.items():
        more = len(mistakes) - 1
        others = f" (and {more} more hosts: see `vpipe doctor --machines`)" if more else ""
        raise kind(f"{host}: {text}{others}")


def warn(text: str) -> None:
    print(printable(f"warning: {text}"), file=sys.stderr, flush=True)


def _python(agent: Agent) -> str:
    command: Any = agent.process.args
    return sys.executable if agent.host.here else str(command[-1]).partition(" ")[0]
