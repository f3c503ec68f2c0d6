"""Ranks that slow each other down: those of one GPU, and those that take turns on the cores of a host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vpipe.cost.costs import Profile


class SharedRanks(NamedTuple):
    """Ranks of which each is the slower the more of them compute."""

    ranks: Sequence[int]
    factors: tuple[float, ...]
    """Of the measured times, by the number of ranks that compute, from none on."""


def shared_ranks(profile: Profile, ranks: int) -> list[SharedRanks]:
    """The groups of so many ranks in which the times are not those of the profile all the time."""
    device = profile.device
    if device.shared_by > 1 and device.crowding > 1:
        each = (device.crowding - 1) / (device.shared_by - 1)
        factors = tuple(
            (1 + each * max(0, busy - 1)) / device.crowding for busy in range(device.shared_by + 1)
        )
        starts = range(0, ranks, device.shared_by)
        return [SharedRanks(range(start, min(start + device.shared_by, ranks)), factors) for start in starts]
    groups = [range(ranks)] if profile.hosts is None else profile.hosts.ranks
    found = ([rank for rank in group if rank < ranks] for group in groups)
    return [
        SharedRanks(own, tuple(max(1.0, busy / device.at_once) for busy in range(len(own) + 1)))
        for own in found
        if 0 < device.at_once < len(own)
    ]


def taking_turns(profile: Profile, ranks: int) -> str | None:
    """A line about ranks for which a host has too few cores; None: all have one."""
    if profile.device.shared_by > 1:
        return None
    most = max((len(group.ranks) for group in shared_ranks(profile, ranks)), default=0)
    return f"{most} ranks of a host take turns on cores for {profile.device.at_once:g}" if most else None
