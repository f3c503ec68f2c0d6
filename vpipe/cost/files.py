"""The profile as a JSON file, which a person can write by hand; docs/formats.md describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from vpipe.cost.costs import Profile
from vpipe.cost.fields import read_object
from vpipe.cost.links import Hosts, LinkCost, MeasuredLinks
from vpipe.cost.pipedream import is_pipedream_graph, read_pipedream_graph
from vpipe.errors import ConfigError
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
    for number, tie in enumerate(profile.tied):
        if tie.blocks[-1] >= len(profile.blocks):
            raise ConfigError(
                f"{path}: tied, entry {number}: blocks is {short_repr(list(tie.blocks))}: "
                f"expected numbers from 0 to {len(profile.blocks) - 1}"
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
        "device": asdict(profile.device),
        "link": asdict(profile.link),
    }
    tied = [asdict(tie) for tie in profile.tied]
    entries = (("links", _pairs(profile.links)), ("hosts", written_hosts(profile.hosts)), ("tied", tied))
    values |= {key: value for key, value in entries if value}
    write_json(path, values | {"blocks": [asdict(block) for block in profile.blocks]})


def written_hosts(hosts: Hosts | None) -> dict[str, Any] | None:
    if hosts is None:
        return None
    values = {"ranks": [list(own) for own in hosts.ranks], "link": asdict(hosts.link)}
    return values | ({"links": _pairs(hosts.links)} if hosts.links else {})


def _pairs(links: Mapping[tuple[int, int], LinkCost]) -> list[dict[str, Any]]:
    return [{"from": a, "to": b} | asdict(link) for (a, b), link in sorted(links.items())]
