"""The key `compress` where a run is planned: counted in the profile, and chosen for `compress: auto`."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any

from vpipe.communication.compression import NONE, read_compression
from vpipe.config.compress import AUTO, compression_by_ranks
from vpipe.cost import Plan, Profile, with_links
from vpipe.cost.compression import FLOAT32, HostPair, with_compression
from vpipe.errors import ConfigError
from vpipe.plan.compression import choose_compression

if TYPE_CHECKING:
    from vpipe.config import RunConfig


def compressed_profile(profile: Profile, config: RunConfig) -> Profile:
    """The profile with the bytes that the configured run sends between hosts, and the time to pack them."""
    if config.compress in (NONE, AUTO) or profile.hosts is None:
        return profile
    links = read_compression(compression_by_ranks(config))
    modes: dict[HostPair, tuple[str, str]] = {}
    for (a, first), (b, second) in combinations(enumerate(profile.hosts.ranks), 2):
        found = links.between(first[0], second[0])
        modes[a, b] = found.forward, found.backward
    return with_compression(profile, modes, links.default.replicas, _itemsize(config))


def choose_for_run(config: RunConfig, profile: Profile, plan: Plan) -> tuple[str | dict[str, Any], str]:
    """What `compress: auto` stands for, by the names of hosts, and a line that says so."""
    assert config.links is not None
    assert config.machines is not None
    profile = with_links(profile, config.path(config.links))
    names = [machine.rpartition(":")[0] for machine in config.machines]
    hosts = () if profile.hosts is None else profile.hosts.ranks
    own = [{names[rank] for rank in ranks if rank < len(names)} for ranks in hosts]
    if sum(map(len, hosts)) != len(names) or any(len(one) != 1 for one in own) or len(own) != len(set(names)):
        raise ConfigError(
            f"{config.source}: links is {config.links!r}, whose hosts are not those of `machines`: measure them again "
            "with `vpipe doctor --machines`"
        )
    chosen = choose_compression(profile, plan, _itemsize(config))
    if not chosen.modes:
        return (
            NONE,
            f"compress: auto: no link bounds an update of {chosen.before:.3g} s, nothing is compressed",
        )
    modes = {f"{names[hosts[a][0]]}/{names[hosts[b][0]]}": mode for (a, b), mode in chosen.modes.items()}
    links = ", ".join(f"{mode} between {link.replace('/', ' and ')}" for link, mode in modes.items())
    return (
        modes,
        f"compress: auto: {links}: an update takes {chosen.after:.3g} s instead of {chosen.before:.3g}",
    )


def _itemsize(config: RunConfig) -> int:
    return FLOAT32 if config.precision == "fp32" else 2
