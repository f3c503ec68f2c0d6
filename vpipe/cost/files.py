"""The profile as a JSON file, which a person can write by hand; docs/formats.md describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from vpipe.cost.costs import Profile
from vpipe.cost.fields import read_object
from vpipe.cost.links import Hosts, LinkCost, MeasuredLinks
from vpipe.cost.pipedream import is_pipedream_graph, read_pipedream_graph
from vpipe.errors import ConfigError, VPipeError
from vpipe.system.files import read_text, short_repr, write_json


def read_any_profile(path: Path) -> Profile:
    """A profile of ours, or PipeDream's graph.txt: whichever the file holds."""
    text = read_text(path)
    if text.lstrip().startswith("{"):
        return read_profile(path)
    if is_pipedream_graph(text):
        return read_pipedream_graph(path)
    raise ConfigError(
        f"{path}: is neither a profile in JSON nor a graph.txt of PipeDream: "
        "make one with `vpipe profile`, or see docs/formats.md"
    )


def read_profile(path: Path) -> Profile:
    profile = read_object(Profile, path)
    for number, other in enumerate(profile.other_sizes):
        sizes = [profile.batch_size, *(each.batch_size for each in profile.other_sizes[:number])]
        if other.batch_size in sizes or len(other.blocks) != len(profile.blocks):
            raise ConfigError(
                f"{path}: other_sizes, entry {number}: has {len(other.blocks)} blocks for a batch_size of "
                f"{other.batch_size}: expected {len(profile.blocks)} blocks, as the profile has, and another "
                f"batch_size than {short_repr(sizes)}"
            )
    for number, tie in enumerate(profile.tied):
        if tie.blocks[-1] >= len(profile.blocks):
            raise ConfigError(
                f"{path}: tied, entry {number}: blocks is {short_repr(list(tie.blocks))}: "
                f"expected numbers from 0 to {len(profile.blocks) - 1}"
            )
    return profile


class GivenHosts(NamedTuple):
    """Hosts and their network, as far as users give them beside a profile."""

    links: Path | None = None
    """A file that `vpipe doctor --machines` wrote."""
    ranks: tuple[tuple[int, ...], ...] | None = None
    """Of each host."""
    network: float | None = None
    """Bytes a second of each host's card."""


def with_hosts(profile: Profile, given: GivenHosts) -> Profile:
    """The profile with these hosts instead of its own."""
    profile = with_links(profile, given.links)
    ranks = given.ranks or (None if profile.hosts is None else profile.hosts.ranks)
    if given.network is not None:
        if ranks is None:
            raise VPipeError("a network is given, but no hosts: give them too, such as --hosts 2x4")
        return replace(profile, hosts=Hosts(ranks, LinkCost(given.network, profile.link.latency)))
    if given.ranks is None or len(given.ranks) == 1:
        return profile
    if profile.hosts is None:
        raise VPipeError(
            f"{len(given.ranks)} hosts are given, but not what their network carries: measure it with `vpipe doctor "
            "--machines` and give --links links.json, or write --network 10Gbit/s"
        )
    if profile.hosts.ranks != given.ranks:
        raise VPipeError(
            f"the hosts have ranks {short_repr(given.ranks)}, but the links are of hosts with ranks "
            f"{short_repr(profile.hosts.ranks)}: measure them again with `vpipe doctor --machines`"
        )
    return profile


def with_links(profile: Profile, path: Path | None) -> Profile:
    """The profile with the hosts and links of a file that `vpipe doctor --machines` wrote, if one is given."""
    if path is None:
        return profile
    found = read_object(MeasuredLinks, path)
    if found.hosts is None and not found.links:
        raise ConfigError(f"{path}: has neither hosts nor links: measure them with `vpipe doctor --machines`")
    return replace(profile, links=found.links, hosts=found.hosts)


def write_profile(profile: Profile, path: Path) -> None:
    values: dict[str, Any] = {
        "format": profile.format,
        "fingerprint": profile.fingerprint,
        "batch_size": profile.batch_size,
        "optimizer_ratio": profile.optimizer_ratio,
        "optimizer": profile.optimizer,
        "device": asdict(profile.device),
        "link": asdict(profile.link),
    }
    tied = [asdict(tie) for tie in profile.tied]
    entries = (("links", _pairs(profile.links)), ("hosts", written_hosts(profile.hosts)), ("tied", tied))
    values |= {key: value for key, value in entries if value}
    values["blocks"] = [asdict(block) for block in profile.blocks]
    if profile.other_sizes:
        values["other_sizes"] = [asdict(other) for other in profile.other_sizes]
    write_json(path, values)


def written_hosts(hosts: Hosts | None) -> dict[str, Any] | None:
    if hosts is None:
        return None
    values = {"ranks": [list(own) for own in hosts.ranks], "link": asdict(hosts.link)}
    return values | ({"links": _pairs(hosts.links)} if hosts.links else {})


def _pairs(links: Mapping[tuple[int, int], LinkCost]) -> list[dict[str, Any]]:
    return [{"from": a, "to": b} | asdict(link) for (a, b), link in sorted(links.items())]
