"""The profile as a JSON file, which a person can write by hand; docs/formats.md describes it."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from vpipe.cost.costs import MeasuredLinks, Profile
from vpipe.cost.fields import read_object
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
    """The profile with the links of a file that `vpipe doctor --machines` wrote, if one is given."""
    return profile if path is None else replace(profile, links=read_object(MeasuredLinks, path).links)


def write_profile(profile: Profile, path: Path) -> None:
    links = [{"from": a, "to": b} | asdict(link) for (a, b), link in sorted(profile.links.items())]
    values: dict[str, Any] = {
        "format": profile.format,
        "fingerprint": profile.fingerprint,
        "batch_size": profile.batch_size,
        "optimizer_ratio": profile.optimizer_ratio,
        "device": asdict(profile.device),
        "link": asdict(profile.link),
    }
    tied = [asdict(tie) for tie in profile.tied]
    values |= {key: entries for key, entries in (("links", links), ("tied", tied)) if entries}
    write_json(path, values | {"blocks": [asdict(block) for block in profile.blocks]})
