"""Checks that all ranks have the same versions and configuration, and are on the hosts that it names."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

import torch

import vpipe
from vpipe.communication import World
from vpipe.config import RunConfig
from vpipe.config.settings import PATHS
from vpipe.errors import ConfigError
from vpipe.launch.hosts import is_here
from vpipe.system.host_identity import host_identity

OF_THE_HOST = {*PATHS, "log_directory", "port", "python_path"} - {"partition"}
"""Keys that may be written differently on each host; what is in the files is compared elsewhere."""


def check_same_config(world: World, config: RunConfig) -> None:
    """Raise on every rank if one differs from rank 0, with the rank and the differences."""
    mine = {
        "version of torch": torch.__version__,
        "version of vpipe": vpipe.__version__,
        "version of Python": ".".join(platform.python_version_tuple()[:2]),
        **config.model_dump(mode="json", exclude=OF_THE_HOST),
    }
    everybody: list[dict[str, Any]] = world.all_gather("versions and configuration", mine)
    for rank, theirs in enumerate(everybody):
        differences = [
            f"{key} {theirs.get(key)!r} and {everybody[0].get(key)!r}"
            for key in sorted({*theirs, *everybody[0]})
            if theirs.get(key) != everybody[0].get(key)
        ]
        if differences:
            raise ConfigError(
                f"rank {rank} differs from rank 0: {'; '.join(differences)}: "
                "start every rank from the same file and the same installation"
            )


def check_hosts(world: World, config: RunConfig) -> None:
    """Raise on every rank if another launcher than ours has put ranks on other hosts than `machines` does.

    A host has several names, which cannot be compared. But ranks of one name must be on one host, and no others; and no
    rank may be on a host that has the name of another.
    """
    if config.machines is None:
        return
    names = [machine.rpartition(":")[0] for machine in config.machines]
    here = name_here(names, world.rank)
    hosts, names_here = zip(*world.all_gather("hosts", [host_identity(), here]), strict=True)
    for rank, name in enumerate(names_here):
        if name != names[rank]:
            raise ConfigError(
                f"{config.source}: machines names {config.machines[rank]!r} for rank {rank}, which was started on "
                f"{name}: start it where it says, or change `machines`"
            )
    first: dict[str, int] = {}
    for rank, (name, host) in enumerate(zip(names, hosts, strict=True)):
        for key in (name, host):
            other = first.setdefault(key, rank)
            if (names[other] == name) != (hosts[other] == host):
                where = f"both on {host.partition('/')[0]}" if hosts[other] == host else "on two hosts"
                mine, theirs = config.machines[rank], config.machines[other]
                raise ConfigError(
                    f"{config.source}: machines names {theirs!r} for rank {other} and {mine!r} for rank {rank}, and "
                    f"they were started {where}: start them where it says, or change `machines`"
                )


def name_here(names: Sequence[str], rank: int) -> str:
    """The rank's own name, unless only one of another rank leads to this host."""
    others = (name for name in dict.fromkeys(names) if name != names[rank])
    return names[rank] if is_here(names[rank]) else next(filter(is_here, others), names[rank])
