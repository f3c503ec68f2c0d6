"""Compression between hosts as planner and simulator count it: fewer bytes, and the time to pack and unpack them.

A link that compresses is one with another bandwidth: the bytes of a value take as long as those that are sent, and the
packing. That is a little too long, for packing holds up the ranks and not the card.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from math import inf

from vpipe.cost.costs import DeviceCost, Profile
from vpipe.cost.links import LinkCost
from vpipe.errors import VPipeError, meant

NONE, BF16, INT8, INT4 = "none", "bf16", "int8", "int4"
HostPair = tuple[int, int]
FLOAT32 = 4
_BYTES = {BF16: 2.0, INT8: 130 / 128, INT4: 68 / 128}
"""For each number: a tile of 128 has a step of 2 bytes, with 4 bits also a mean (`communication/compression.py`)."""


def with_compression(
    profile: Profile,
    modes: Mapping[HostPair, tuple[str, str]],
    replicas: str = NONE,
    itemsize: int = FLOAT32,
) -> Profile:
    """The profile of a run that compresses what goes between these pairs of hosts: activations and their gradients.

    `itemsize` are the bytes of a number without compression.
    """
    hosts = profile.hosts
    if hosts is None:
        return profile
    links = dict(hosts.links)
    pairs = [(a, b) for a in range(len(hosts.ranks)) for b in range(len(hosts.ranks)) if a != b]
    for a, b in pairs:
        forward, backward = modes.get((a, b), modes.get((b, a), (NONE, NONE)))
        link = hosts.links.get((a, b), hosts.link)
        each = [_seconds_a_byte(profile.device, link, mode, itemsize) for mode in (forward, backward)]
        reducing = _bandwidth(_seconds_a_byte(profile.device, link, replicas, itemsize))
        links[a, b] = replace(link, bandwidth=_bandwidth(sum(each) / 2), reducing=reducing)
    return replace(profile, hosts=replace(hosts, links=links))


def with_mode(profile: Profile, mode: str) -> Profile:
    """The profile of a run that compresses activations and their gradients between all hosts in one way."""
    if mode not in (NONE, *_BYTES):
        raise VPipeError(f"compress is {mode[:60]!r}: {meant(mode[:60], (NONE, *_BYTES))}")
    if mode != NONE and profile.hosts is None:
        raise VPipeError(f"compress is {mode!r}, and all ranks are on one host: give links or hosts")
    count = 0 if profile.hosts is None else len(profile.hosts.ranks)
    return with_compression(profile, dict.fromkeys(combinations(range(count), 2), (mode, mode)))


def _bandwidth(seconds: float) -> float:
    return 1 / seconds if seconds else inf


def _seconds_a_byte(device: DeviceCost, link: LinkCost, mode: str, itemsize: int) -> float:
    """Of a byte without compression."""
    if mode == NONE or _BYTES[mode] >= itemsize:
        return 1 / link.bandwidth
    packing = {BF16: device.pack_bf16, INT8: device.pack_int8, INT4: device.pack_int4}[mode]
    return _BYTES[mode] / itemsize / link.bandwidth + packing
