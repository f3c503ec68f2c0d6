"""The examination of a run's hosts: `vpipe doctor --machines run.yml`."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from vpipe.cost import Hosts, LinkCost
from vpipe.cost.files import written_hosts
from vpipe.errors import ConfigError, RankFailedError, printable
from vpipe.launch.agents import Agent, ask, greet, skewed, started_agents
from vpipe.launch.facts import host_facts
from vpipe.launch.hosts import Host, hosts_of
from vpipe.launch.remote import addresses_by_ssh
from vpipe.launch.signals import LauncherSignals, handling_signals
from vpipe.system.console import announce, show
from vpipe.system.files import json_text, write_json
from vpipe.train.carried import carried_files

if TYPE_CHECKING:
    from vpipe.config import RunConfig


@dataclass
class HostReport:
    host: str
    ranks: tuple[int, ...]
    wrong: list[str] = field(default_factory=list)
    """One line each, with the fix."""
    facts: dict[str, Any] = field(default_factory=dict)
    clock: float = 0.0
    """Seconds ahead of this host's."""
    config: str = ""
    interface: str = ""
    """That leads to the others."""


@dataclass(frozen=True)
class MeasuredPair:
    sender: str
    receiver: str
    bandwidth: float
    latency: float


def examine_hosts(config: RunConfig, path: Path, output: Path, as_json: bool) -> bool:
    """Examine every host of `machines` and every pair of them, and write the links; whether all is well."""
    if config.machines is None:
        raise ConfigError(f"{config.source}: it names no machines: write `machines: [host:GPU, ...]`")
    hosts = hosts_of(config.machines)
    reports = {host.name: HostReport(host.name, host.ranks) for host in hosts}
    pairs: list[MeasuredPair] = []
    announce(f"{config.source}: examining {len(hosts)} hosts")
    with (
        handling_signals() as signals,
        started_agents(hosts, config.python or sys.executable, config.heartbeat_limit) as agents,
    ):
        wrong = greet(agents, signals, host_facts())
        for name, text in wrong.items():
            reports[name].wrong.append(text)
        reached = [agent for agent in agents if agent.facts]
        for agent in reached:
            _examine(agent, reports[agent.host.name], config)
        _compare(reached, reports)
        usable = [agent for agent in reached if agent.host.name not in wrong]
        _ask_each(usable, signals, reports, config, path)
        for caller, listener in permutations(usable, 2):
            _measure(caller, listener, usable, signals, reports, pairs)
    if pairs:
        write_links(pairs, hosts, output)
    _show(list(reports.values()), pairs, as_json)
    for report in reports.values():
        for text in report.wrong:
            print(printable(f"error: {report.host}: {text}"), file=sys.stderr)
    if pairs and not as_json:
        print(printable(f"links {output}: `vpipe plan --links {output}` plans with them"))
    return not any(report.wrong for report in reports.values())


def _examine(agent: Agent, report: HostReport, config: RunConfig) -> None:
    """What its first message says."""
    report.facts, report.clock = agent.facts, agent.skew
    if line := skewed(agent):
        report.wrong.append(line)
    assert config.machines is not None
    named = max(int(config.machines[rank].rpartition(":")[2]) for rank in agent.host.ranks)
    count = agent.facts["gpus"]
    if count and named >= count:
        report.wrong.append(f"machines names its GPU {named}, and it has {count}: name 0 to {count - 1}")


def _compare(agents: Sequence[Agent], reports: dict[str, HostReport]) -> None:
    """What fits on one host but not with the others."""
    with_gpus = [agent for agent in agents if agent.facts["gpus"]]
    for agent in agents:
        if with_gpus and agent not in with_gpus:
            other = with_gpus[0].host.name
            reports[agent.host.name].wrong.append(
                f"it has no GPU and {other} has: give all ranks GPUs (see `nvidia-smi` there), or set VPIPE_DEVICE=cpu"
            )
    names: dict[str, str] = {}
    for agent in agents:
        other = names.setdefault(agent.facts["host"], agent.host.name)
        if other != agent.host.name:
            reports[agent.host.name].wrong.append(
                f"it is the same host as {other!r}: write one name in `machines`"
            )


def _ask_each(
    agents: Sequence[Agent],
    signals: LauncherSignals,
    reports: dict[str, HostReport],
    config: RunConfig,
    path: Path,
) -> None:
    """Files that the run needs on each host, and whether it has the configuration too."""
    order = {"files": carried_files(config), "config": str(path.absolute()), "source": str(path)}
    mine = hashlib.sha256(path.read_bytes()).hexdigest()
    for agent in agents:
        report = reports[agent.host.name]
        try:
            found = ask([agent], signals, "examined", lambda _: {"examine": order})[agent.host.name]
        except (ConfigError, RankFailedError) as error:
            report.wrong.append(str(error).removeprefix(f"{agent.host.name}: "))
            continue
        report.wrong += found["wrong"]
        report.config = {None: "not there; brought along", mine: "the same"}.get(found["config"], "another")
        if report.config == "another":
            report.wrong.append(
                f"{path.absolute()} has other content than here: `vpipe train` brings its own, but torchrun would read "
                "it: copy it there, or delete it"
            )


def _measure(
    caller: Agent,
    listener: Agent,
    agents: Sequence[Agent],
    signals: LauncherSignals,
    reports: dict[str, HostReport],
    pairs: list[MeasuredPair],
) -> None:
    """The link from one host to another."""
    from_, to = caller.host.name, listener.host.name
    others = [agent for agent in agents if agent is not listener]
    try:
        where = ask(
            [listener], signals, "serving", lambda _: {"serve": [to, *addresses_by_ssh(listener, others)]}
        )
        found = ask([caller], signals, "measured", lambda _: {"measure": where[to]})[from_]
    except (ConfigError, RankFailedError) as error:
        name, _, text = str(error).partition(": ")
        known = reports.get(name, reports[from_])
        known.wrong.append(text if name in reports else str(error))
        return
    reports[from_].interface = found[2]
    pairs.append(MeasuredPair(from_, to, found[0], found[1]))


def write_links(pairs: Sequence[MeasuredPair], hosts: Sequence[Host], output: Path) -> None:
    """The hosts with their ranks and links, as a profile has them; pairs that were not measured as the slowest."""
    numbers = {host.name: number for number, host in enumerate(hosts)}
    links = {
        (numbers[pair.sender], numbers[pair.receiver]): LinkCost(pair.bandwidth, pair.latency)
        for pair in pairs
    }
    slowest = min(links.values(), key=lambda link: link.bandwidth)
    found = Hosts(tuple(host.ranks for host in hosts), slowest, links)
    write_json(output, {"hosts": written_hosts(found)})


def _show(reports: Sequence[HostReport], pairs: Sequence[MeasuredPair], as_json: bool) -> None:
    if as_json:
        values = {"hosts": [asdict(one) for one in reports], "pairs": [asdict(one) for one in pairs]}
        print(json_text(values, ascii=True))
        return
    wrong = sum(bool(report.wrong) for report in reports)
    table = Table(title=f"{len(reports)} hosts: " + (f"{wrong} cannot be used" if wrong else "all is well"))
    for column in (
        "",
        "host",
        "ranks",
        "vpipe",
        "torch",
        "Python",
        "GPUs",
        "clock",
        "configuration",
        "interface",
    ):
        table.add_column(column, overflow="fold")
    for report in reports:
        facts = [str(report.facts.get(key, "?")) for key in ("vpipe", "torch", "python", "gpus")]
        ranks = ", ".join(map(str, report.ranks))
        clock = f"{report.clock:+.1f} s" if report.facts else "?"
        mark = "✗" if report.wrong else "✓"
        table.add_row(mark, report.host, ranks, *facts, clock, report.config or "?", report.interface or "?")
    show(table)
    if pairs:
        links = Table(title="Links between the hosts")
        for column in ("from", "to", "bandwidth", "latency"):
            links.add_column(column, justify="right" if column in ("bandwidth", "latency") else "left")
        for pair in pairs:
            speed = f"{pair.bandwidth * 8 / 1e9:.3g} Gbit/s"
            links.add_row(pair.sender, pair.receiver, speed, f"{1e6 * pair.latency:.0f} us")
        show(links)
