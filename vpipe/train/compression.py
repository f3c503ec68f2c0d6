"""The key `compress` where a run is planned: counted in the profile, and chosen for `compress: auto`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING

from vpipe.config.compress import AUTO, compression_by_ranks
from vpipe.cost import Plan, Profile
from vpipe.cost.compression import FLOAT32, NONE, HostPair, with_compression
from vpipe.plan.compression import choose_compression

if TYPE_CHECKING:
    from vpipe.config import RunConfig


def compressed_profile(profile: Profile, config: RunConfig) -> Profile:
    """The profile with the bytes that the configured run sends between hosts, and the time to pack them."""
    if config.compress in (NONE, AUTO) or profile.hosts is None:
        return profile
    from vpipe.communication.compression import read_compression  # with torch, which takes seconds

    links = read_compression(compression_by_ranks(config))
    modes: dict[HostPair, tuple[str, str]] = {}
    for (a, first), (b, second) in combinations(enumerate(profile.hosts.ranks), 2):
        found = links.between(first[0], second[0])
        modes[a, b] = found.forward, found.backward
    return with_compression(profile, modes, links.default.replicas, _itemsize(config))


def choose_for_run(config: RunConfig, profile: Profile, plan: Plan) -> tuple[dict[HostPair, str], str]:
    """The modes that `compress: auto` stands for, of pairs of hosts of the profile, and a line that says so."""
    if profile.hosts is None:
        return {}, "compress: auto: all ranks are on one host, nothing is compressed"
    chosen = choose_compression(profile, plan, _itemsize(config))
    if not chosen.modes:
        return {}, f"compress: auto: no link bounds an update of {chosen.before:.3g} s, nothing is compressed"
    names = [_name(config, ranks) for ranks in profile.hosts.ranks]
    links = ", ".join(f"{mode} between {names[a]} and {names[b]}" for (a, b), mode in chosen.modes.items())
    return (
        chosen.modes,
        f"compress: auto: {links}: an update takes {chosen.after:.3g} s instead of {chosen.before:.3g}",
    )


def _name(config: RunConfig, ranks: Sequence[int]) -> str:
    if config.machines is not None:
        return config.machines[ranks[0]].rpartition(":")[0]
    return f"the host of rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _itemsize(config: RunConfig) -> int:
    return FLOAT32 if config.precision == "fp32" else 2
