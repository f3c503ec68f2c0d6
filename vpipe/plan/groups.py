"""Groups of blocks with equal figures, of which only counts are chosen; and the places that counts stand for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from vpipe.cost import KEEP, RECOMPUTE, SWAP, Profile, input_bytes
from vpipe.plan.model import Slice
from vpipe.plan.prices import Counts, Group

Policies = list[list[str]]


class Members(NamedTuple):
    """Which blocks a group's counts speak of: (slice, block)."""

    group: Group
    places: list[tuple[int, int]]


def group_blocks(profile: Profile, slices: Sequence[Slice]) -> list[Members]:
    found: dict[tuple[float, ...], list[tuple[int, int]]] = {}
    for index, piece in enumerate(slices):
        load = piece.load
        for number in range(piece.start, piece.stop):
            block = profile.blocks[number]
            kept = block.kept_bytes
            recompute = load.in_flight * (kept - input_bytes(profile.blocks, number))
            swap = max(0, load.in_flight - profile.device.lying(load.in_flight)) * kept
            key = (kept, block.again, max(0, recompute), swap, block.swapping if swap else 0.0)
            found.setdefault(key, []).append((index, number))
    return [
        Members(Group(int(kept), again, int(recompute), int(swap), swapping, len(places)), places)
        for (kept, again, recompute, swap, swapping), places in found.items()
    ]


def ceilings(members: Sequence[Members]) -> Iterator[list[Members]]:
    """The groups as they are, and with ever smaller blocks the largest that may be recomputed."""
    sizes = {found.group.kept for found in members if found.group.recompute}
    for ceiling in sorted({0, *sizes}, reverse=True):
        yield [
            found if found.group.kept <= ceiling else found._replace(group=found.group._replace(recompute=0))
            for found in members
        ]


def placed(slices: Sequence[Slice], members: Sequence[Members], counts: Counts) -> Policies:
    """Recomputed are the first of a group, while all behind them is there to be given back before; swapped the last."""
    policies: Policies = [[KEEP] * (piece.stop - piece.start) for piece in slices]
    for found, (recomputed, swapped) in zip(members, counts, strict=True):
        for position, (piece, block) in enumerate(found.places):
            if position < recomputed:
                policies[piece][block - slices[piece].start] = RECOMPUTE
            elif position >= len(found.places) - swapped:
                policies[piece][block - slices[piece].start] = SWAP
    return policies


def saving_most(members: Sequence[Members]) -> Counts:
    """Every block recomputed or swapped, whichever saves more, unless neither saves anything."""
    counts: Counts = []
    for group, _ in members:
        if group.recompute > 0 and group.recompute >= group.swap:
            counts.append((group.blocks, 0))
        else:
            counts.append((0, group.blocks if group.swap else 0))
    return counts
