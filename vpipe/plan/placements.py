"""The placements of a pipeline's positions on hosts: which rank runs which replica of which position.

Ranks of a host are alike, so a placement is a host for each replica of each position, and its ranks follow. Hosts that
nothing distinguishes are used in their order: of placements that differ in the names of hosts only, one is tried. Where
there are too many, only regular ones are:

    hosts of 4 ranks, 4 positions of 2 replicas      a row for each replica, a letter for each host

    bands = 1   A A B B     position by position      bands = 2   A A A A     replica by replica
                A A B B                                           B B B B
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from vpipe.cost import Hosts, Profile
from vpipe.schedule.program import Placement

MOST = 120
"""Placements of one pipeline that are all tried, if it has"""
FEW = 12
"""ranks at most."""


def placements(profile: Profile, replicas: Sequence[int]) -> tuple[list[Placement], bool]:
    """Those to try, regular ones first, and whether these are all."""
    ranks = sum(replicas)
    hosts = [] if profile.hosts is None else ranks_of_hosts(profile.hosts, ranks)
    if len(hosts) < 2 or max(map(len, hosts)) == ranks:
        return [in_turn(replicas, range(ranks))], True
    assert profile.hosts is not None
    alike = classes(profile.hosts, hosts)
    found = dict.fromkeys(renamed(assigned, alike) for assigned in regular(replicas, hosts))
    complete = ranks <= FEW
    if complete:
        every = list(islice(assignments(ranks, [len(own) for own in hosts], alike), MOST + 1))
        complete = len(every) <= MOST
        found |= dict.fromkeys(every if complete else ())
    return [with_ranks(replicas, hosts, assigned) for assigned in found], complete


def ranks_of_hosts(hosts: Hosts, ranks: int) -> list[list[int]]:
    """Of a pipeline of so many ranks; hosts without any are left out."""
    found = [[rank for rank in own if rank < ranks] for own in hosts.ranks]
    return [own for own in found if own]


def in_turn(replicas: Sequence[int], ranks: Sequence[int]) -> Placement:
    """Ranks in this order, position by position."""
    left = iter(ranks)
    return tuple(tuple(next(left) for _ in range(count)) for count in replicas)


def with_ranks(replicas: Sequence[int], hosts: Sequence[Sequence[int]], assigned: Sequence[int]) -> Placement:
    """`assigned`: the host of each replica, position by position; each host's ranks are used in their order."""
    left = [iter(own) for own in hosts]
    return in_turn(replicas, [next(left[host]) for host in assigned])


def classes(hosts: Hosts, used: Sequence[Sequence[int]]) -> list[int]:
    """A number for each host, equal for those that can be exchanged: as many ranks, the same links to all others."""
    numbers = [hosts.host_of(own[0]) for own in used]

    def link(one: int, other: int) -> object:
        return hosts.links.get((numbers[one], numbers[other]), hosts.link)

    def exchanged(one: int, other: int) -> bool:
        others = [host for host in range(len(used)) if host not in (one, other)]
        return (
            len(used[one]) == len(used[other])
            and link(one, other) == link(other, one)
            and all(link(one, host) == link(other, host) for host in others)
            and all(link(host, one) == link(host, other) for host in others)
        )

    found: list[int] = []
    for host in range(len(used)):
        found.append(
            next(
                (number for number in range(host) if found[number] == number and exchanged(host, number)),
                host,
            )
        )
    return found


def assignments(slots: int, room: Sequence[int], alike: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every host for every slot, as many of each as it has room; of hosts that are alike the first unused one."""

    def extend(chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(chosen) == slots:
            yield chosen
            return
        begun: set[int] = set()
        for host, most in enumerate(room):
            taken = chosen.count(host)
            if taken == most or (not taken and alike[host] in begun):
                continue
            if not taken:
                begun.add(alike[host])
            yield from extend((*chosen, host))

    return extend(())


def renamed(assigned: Sequence[int], alike: Sequence[int]) -> tuple[int, ...]:
    """The same with hosts that are alike used in their order, as `assignments` has it."""
    names: dict[int, int] = {}
    for host in assigned:
        if host not in names:
            own = (other for other, number in enumerate(alike) if number == alike[host])
            names[host] = next(other for other in own if other not in names.values())
    return tuple(names[host] for host in assigned)


def regular(replicas: Sequence[int], hosts: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    """The replicas of all positions in 1, 2, 4, ... bands; a band is placed position by position."""
    slots = [(position, number / count) for position, count in enumerate(replicas) for number in range(count)]
    filled = [host for host, own in enumerate(hosts) for _ in own]
    bands = 1
    while bands < 2 * max(replicas):
        order = sorted(range(len(slots)), key=lambda slot: (int(slots[slot][1] * bands), slots[slot]))
        assigned = [0] * len(slots)
        for host, slot in zip(filled, order, strict=True):
            assigned[slot] = host
        yield tuple(assigned)
        bands *= 2
