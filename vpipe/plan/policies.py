"""The choice of keep, recompute or swap for each block of a rank: the least time that fits the memory.

Blocks with equal figures are one group, and only counts are chosen. Where recomputing needs room for its largest
block, that block is enumerated; for each, `branch.py` finds the best counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from vpipe.cost import KEEP, RECOMPUTE, SWAP, Profile
from vpipe.plan.branch import GAP, Counts, Group, Search, efficiency
from vpipe.plan.model import (
    Slice,
    buffer_bytes,
    copy_seconds,
    host_bandwidth,
    input_bytes,
    stage_memory,
    stage_time,
    update_seconds,
    weight_bytes,
)

FEW = 10
"""So many blocks are always worth an exact choice."""


class Members(NamedTuple):
    """Which blocks a group's counts speak of: (slice, block)."""

    group: Group
    places: list[tuple[int, int]]
    transient: bool
    """Whether recomputing needs room for the block itself, once."""


Policies = list[list[str]]


def choose(profile: Profile, slices: Sequence[Slice], memory: int) -> tuple[float, Policies] | None:
    """The least time, without the link's, and the policies that give it; None if nothing fits `memory`."""
    members = group_blocks(profile, slices)
    need = bytes_of_keeping(profile, slices) - memory
    compute = compute_seconds(profile, slices)
    policies: Policies = [[KEEP] * (piece.stop - piece.start) for piece in slices]
    if need <= 0:
        return compute, policies
    few = sum(found.group.blocks for found in members) <= FEW
    search = Search(compute, host_bandwidth(profile), 0.0 if few else GAP)
    best: tuple[Counts, list[Members]] | None = None
    for room, allowed in rooms(members):
        ordered = sorted(allowed, key=lambda found: (-efficiency(found.group), found.places))
        counts = search.improve([found.group for found in ordered], need + room)
        if counts is not None:
            best = counts, ordered
    if best is None:
        return None
    for (recomputed, swapped), found in zip(*best, strict=True):
        # From the end, so that the choice has the shape of a recompute ratio where it can.
        for position, (piece, block) in enumerate(reversed(found.places)):
            if position < recomputed:
                policies[piece][block - slices[piece].start] = RECOMPUTE
            elif position >= len(found.places) - swapped:
                policies[piece][block - slices[piece].start] = SWAP
    return search.seconds, policies


def from_the_end(profile: Profile, piece: Slice, policies: list[str], memory: int) -> list[str]:
    """As many recomputed blocks, but the last ones, if that is as fast and fits: the guides' recompute ratio."""
    if SWAP in policies:
        return policies
    count = policies.count(RECOMPUTE)
    shifted = [KEEP] * (len(policies) - count) + [RECOMPUTE] * count
    if stage_memory(profile, [piece], [shifted]).total > memory:
        return policies
    seconds, shifted_seconds = (
        stage_time(profile, [piece], [chosen]).seconds for chosen in (policies, shifted)
    )
    return shifted if shifted_seconds <= seconds else policies


def least_memory(profile: Profile, slices: Sequence[Slice]) -> int:
    """The smallest memory in which the slices run at all."""
    keeping = bytes_of_keeping(profile, slices)
    return keeping - max(
        sum(found.group.blocks * max(found.group.recompute, found.group.swap, 0) for found in allowed) - room
        for room, allowed in rooms(group_blocks(profile, slices))
    )


def bytes_of_keeping(profile: Profile, slices: Sequence[Slice]) -> int:
    return sum(
        weight_bytes(profile, piece)
        + buffer_bytes(profile, piece)
        + piece.load.in_flight * sum(block.kept_bytes for block in profile.blocks[piece.start : piece.stop])
        for piece in slices
    )


def compute_seconds(profile: Profile, slices: Sequence[Slice]) -> float:
    return sum(
        sum(block.forward + block.backward for block in profile.blocks[piece.start : piece.stop])
        + update_seconds(profile, piece)
        + sum(copy_seconds(profile, piece))
        for piece in slices
    )


def group_blocks(profile: Profile, slices: Sequence[Slice]) -> list[Members]:
    found: dict[tuple[float, ...], list[tuple[int, int]]] = {}
    for index, piece in enumerate(slices):
        load = piece.load
        for number in range(piece.start, piece.stop):
            block = profile.blocks[number]
            kept, entered = block.kept_bytes, input_bytes(profile.blocks, number)
            again = kept * load.begun if load.split else 0
            recompute = load.in_flight * (kept - entered) - again
            swap = (load.in_flight - load.swapped_in) * kept
            key = (kept, block.forward, recompute, swap, load.split)
            found.setdefault(key, []).append((index, number))
    return [
        Members(Group(int(kept), again, int(recompute), int(swap), len(places)), places, not split)
        for (kept, again, recompute, swap, split), places in found.items()
    ]


def rooms(members: Sequence[Members]) -> Iterable[tuple[int, list[Members]]]:
    """Each room that may be set aside for recomputing, with the groups as they may be used in it."""
    sizes = {found.group.kept for found in members if found.transient and found.group.recompute > 0}
    for room in sorted({0, *sizes}, reverse=True):
        yield (
            room,
            [
                found
                if found.group.recompute > 0 and (not found.transient or found.group.kept <= room)
                else found._replace(group=found.group._replace(recompute=0))
                for found in members
            ],
        )
