"""What ranks choose when they have met (`partition: auto`, `compress: auto`): on several hosts, or of torchrun or srun.

    rank      0      1  │   2      3        two hosts
    links     ◀──────── │ ──▶               the first rank of each host measures those to the other hosts
    model     measured  │                   in a process of its own, so that rank 0 stays as it was
    plan      made  ────┼──────▶            the others wait for it

Ranks that all share one GPU do so too, and measure the model together: each is as slow as all of them make it.

The folder of the run gets the plan, and the profile with hosts and links: a run that is started again in its folder
takes them from there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from vpipe.communication import World, agree
from vpipe.config import RunConfig
from vpipe.config.compress import BETWEEN
from vpipe.config.file import AUTO, with_plan
from vpipe.cost import (
    GivenHosts,
    Hosts,
    LinkCost,
    Profile,
    read_plan,
    read_profile,
    with_hosts,
    write_profile,
)
from vpipe.cost.compression import HostPair
from vpipe.errors import PeerError
from vpipe.launch.measure import MeasuredLink, measure, serve_measurement
from vpipe.system.environment import GPU_SHARE
from vpipe.system.files import exists, read_text, write_text
from vpipe.system.host_identity import host_identity
from vpipe.system.start import Phases
from vpipe.train.checks import check_choosable
from vpipe.train.compression import choose_for_run
from vpipe.train.planning import (
    PLAN,
    PROFILE,
    cached_profile,
    keep_profile,
    kept_profile,
    of_one_host,
    profile_name,
    write_run_plan,
)
from vpipe.train.profiling import measure_before_training, profile_in_own_process

POLL = 0.1
HostRanks = tuple[tuple[int, ...], ...]


def choose_by_ranks(
    world: World,
    config: RunConfig,
    folder: Path,
    phases: Phases,
    say: Callable[[str], None],
    inform: Callable[[str], None],
) -> RunConfig:
    """The configuration with what was chosen in the place of `auto`; the same on every rank.

    `say` is called, on rank 0, with what begins and takes its time, and `inform` with what was chosen.
    """
    check_choosable(config)
    phases.begin("profile")
    hosts = _ranks_of_hosts(world)
    if os.environ.get(GPU_SHARE) == str(world.size) != "1":
        _measure_together(world, config, folder / PROFILE, say)
    known = world.all_gather("profile", exists(folder / PROFILE))[0]
    network = None
    if len(hosts) > 1 and not known and config.links is None:
        say(f"measuring the links between {len(hosts)} hosts")
        network = measure_hosts(world, hosts)
    made: list[Any] = []

    def choose() -> None:
        if world.rank:
            while not world.published("plan", 0):  # without a limit: `agree` has one
                time.sleep(POLL)
            return
        try:
            profile = _profile(config, folder, hosts, network, say)
            phases.begin("plan")
            made.extend(_choose(config, profile, folder, inform))
        finally:
            world.publish("plan", True)

    agree(world, "plan", choose)
    plan, modes = world.all_gather("plan of rank 0", made)[0]
    if config.partition == AUTO:
        path = folder / PLAN
        first = any(world.rank == own[0] for own in hosts)
        if first and not exists(path):  # a host that does not share the folder
            write_text(path, plan)
        agree(world, "plan of this host", lambda: None)
        config = with_plan(config, path)
    if config.compress == AUTO:
        config = with_modes(config, hosts, {(a, b): mode for (a, b), mode in modes})
    return config


def _measure_together(world: World, config: RunConfig, file: Path, say: Callable[[str], None]) -> None:
    """Measure the model, unless a profile is in the run's folder, where this one goes, or is kept for all runs."""

    def find() -> str | None:
        """The name under which to keep it; None: there is one."""
        if world.rank or exists(file):
            return None
        name = profile_name(config)
        profile = kept_profile(name)
        if profile is None:
            return name
        write_profile(profile, file)
        return None

    name = world.all_gather("name of the profile", agree(world, "search for a profile", find))[0]
    if name is None:
        return
    say(f"measuring the blocks of the model, {world.size} ranks at once")
    measure_before_training(world, config, file)
    if world.rank == 0:
        keep_profile(name, read_profile(file))


def _ranks_of_hosts(world: World) -> HostRanks:
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(world.all_gather("host", host_identity())):
        ranks.setdefault(host, []).append(rank)
    return tuple(map(tuple, ranks.values()))


def measure_hosts(world: World, hosts: HostRanks) -> Hosts:
    """The hosts with the links between them, each pair measured both ways by the first rank of each."""
    first = [own[0] for own in hosts]
    here = first.index(world.rank) if world.rank in first else None
    peers = [rank for rank in first if rank != world.rank] if here is not None else []
    sockets = world.connect_streams("links between hosts", peers, world.all_gather)
    found: list[tuple[int, int, MeasuredLink]] = []

    def measure_both_ways(pair: tuple[int, int]) -> None:
        for caller, listener in (pair, pair[::-1]):
            if here == caller:
                found.append((caller, listener, measure(sockets[first[listener]])))
            elif here == listener:
                serve_measurement(sockets[first[caller]])

    def measure_own(pairs: Sequence[tuple[int, int]]) -> None:
        for pair in pairs:
            if here in pair:
                try:
                    measure_both_ways(pair)
                except OSError as error:
                    a, b = (first[host] for host in pair)
                    raise PeerError(
                        f"the link between the hosts of ranks {a} and {b} cannot be measured: {error}"
                    ) from None

    try:
        for pairs in rounds(len(hosts)):
            agree(world, "links", partial(measure_own, pairs))
    finally:
        for link in sockets.values():
            link.close()
    rows = world.all_gather("measured links", found)
    links = {
        (caller, listener): LinkCost(bandwidth, latency)
        for row in rows
        for caller, listener, (bandwidth, latency, _) in row
    }
    return Hosts(hosts, min(links.values(), key=lambda link: link.bandwidth), links)


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Every pair once; the pairs of a round have no member in common, so that they can be measured at the same time."""
    ring = [*range(count), *[-1] * (count % 2)]  # one more, who is nobody, makes them even
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if min(pair) >= 0]
        ring = [ring[0], ring[-1], *ring[1:-1]]


def _profile(
    config: RunConfig, folder: Path, hosts: HostRanks, network: Hosts | None, say: Callable[[str], None]
) -> Profile:
    if exists(folder / PROFILE):
        return read_profile(folder / PROFILE)
    say("measuring the model and planning")
    profile = replace(cached_profile(of_one_host(config, hosts[0]), profile_in_own_process), hosts=network)
    if config.links is not None:
        profile = with_hosts(profile, GivenHosts(config.file("links"), hosts))
    return profile


def _choose(
    config: RunConfig, profile: Profile, folder: Path, inform: Callable[[str], None]
) -> tuple[str | None, list[tuple[HostPair, str]]]:
    """The text of the plan, and the modes of pairs of hosts."""
    path = folder / PLAN if config.planned is None else config.planned[0]
    text = None
    if config.partition == AUTO:
        inform(write_run_plan(config, path, profile=profile, all_ranks=True, inform=inform))
        text = read_text(path)
    else:
        write_profile(profile, folder / PROFILE)
    modes: dict[HostPair, str] = {}
    if config.compress == AUTO:
        modes, line = choose_for_run(config, profile, read_plan(path))
        inform(line)
    return text, list(modes.items())


def with_modes(config: RunConfig, hosts: HostRanks, modes: Mapping[HostPair, str]) -> RunConfig:
    """The configuration with modes for these pairs of hosts, by their names or, where it has none, by ranks."""
    found: dict[str, str] = {}
    for (a, b), mode in modes.items():
        links = product(_names(config, hosts[a]), _names(config, hosts[b]))
        found |= {BETWEEN.join(names): mode for names in links}
    return config.model_copy(update={"compress": found or "none", "links": None})


def _names(config: RunConfig, ranks: Sequence[int]) -> list[str]:
    if config.machines is None:
        return [str(rank) for rank in ranks]
    return [config.machines[ranks[0]].rpartition(":")[0]]
