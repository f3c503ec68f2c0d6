"""The moments at which a rank with several slices holds most: how many minibatches of each, at the same time.

    zb-v, 4 ranks, rank 0     of its first chunk 7 are in flight when none of its second is,
                              and 4 when of its second there are 4

Each slice's own most (`Load`) would add up to more than the rank ever holds. A moment is one that no other exceeds in
all counts; memory is linear in them, so its most is found at one of these few.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from vpipe.cost import SWAP, Profile, backward_bytes, held_bytes
from vpipe.plan.model import Memory, Slice, buffer_bytes, weight_bytes
from vpipe.schedule import Op, Schedule, build


class Moment(NamedTuple):
    running: int | None
    """The place, among the rank's slices, of the one whose backward runs."""
    counts: tuple[tuple[int, int], ...]
    """Of each slice: minibatches in flight, and those between the end of their I and that of their W."""


@lru_cache(maxsize=64)
def schedule_moments(
    name: str, positions: int, replicas: int, minibatches: int, chunks: int | None
) -> tuple[tuple[Moment, ...], ...]:
    """Those of each position, whose ranks' programs differ in the minibatches only."""
    schedule = build(name, positions, minibatches, chunks=chunks, replicas=[replicas] * positions)
    return tuple(moments(schedule, position * replicas) for position in range(positions))


def moments(schedule: Schedule, rank: int) -> tuple[Moment, ...]:
    place = {stage: number for number, stage in enumerate(schedule.stages_of(rank))}
    now = [[0, 0] for _ in place]
    seen: dict[Moment, None] = {}
    for stage, op, _ in schedule.program(rank):
        own = now[place[stage]]
        if op is Op.F:
            own[0] += 1
        if op in (Op.F, Op.I, Op.B):
            running = None if op is Op.F else place[stage]
            seen[Moment(running, tuple((count[0], count[1]) for count in now))] = None
        if op in (Op.I, Op.B):
            own[0] -= 1
        if op in (Op.I, Op.W):
            own[1] += 1 if op is Op.I else -1
    return tuple(_largest(seen))


def _largest(seen: Iterable[Moment]) -> list[Moment]:
    """Those that no other of the same running slice exceeds."""
    largest: list[Moment] = []
    for moment in sorted(seen, key=lambda m: -sum(map(sum, m.counts))):
        if not any(m.running == moment.running and _covers(m, moment) for m in largest):
            largest.append(moment)
    return largest


def _covers(one: Moment, other: Moment) -> bool:
    pairs = zip(one.counts, other.counts, strict=True)
    return all(a[0] >= b[0] and a[1] >= b[1] for a, b in pairs)


def at_moments(slices: Sequence[Slice], taken: Iterable[Moment]) -> list[Slice]:
    """The slices with the most that each has at any of these moments, in place of the most that it ever has."""
    counts = list(zip(*(moment.counts for moment in taken), strict=True))
    return [
        piece._replace(
            load=piece.load._replace(in_flight=max(1, *(f for f, _ in own)), waiting=max(w for _, w in own))
        )
        for piece, own in zip(slices, counts, strict=True)
    ]


def peak_memory(
    profile: Profile, slices: Sequence[Slice], policies: Sequence[Sequence[str]], offered: Sequence[Moment]
) -> tuple[Memory, Moment]:
    """What the rank holds at the worst of these moments, and which that is."""
    held, swapped, deferred, backward = [], [], [], []
    for piece, chosen in zip(slices, policies, strict=True):
        numbers = range(piece.start, piece.stop)
        sizes = [held_bytes(profile.blocks, n, policy) for n, policy in zip(numbers, chosen, strict=True)]
        moved = sum(size for size, policy in zip(sizes, chosen, strict=True) if policy == SWAP)
        held.append(sum(sizes) - moved)
        swapped.append(moved)
        deferred.append(sum(profile.blocks[number].deferred for number in numbers))
        backward.append(backward_bytes(profile.blocks, piece.start, chosen, piece.load.split))

    def at(moment: Moment) -> tuple[int, int]:
        activations = sum(
            held[i] * flying + swapped[i] * min(flying, 2) + deferred[i] * waiting
            for i, (flying, waiting) in enumerate(moment.counts)
        )
        return activations, 0 if moment.running is None else backward[moment.running]

    worst = max(offered, key=lambda moment: sum(at(moment)))
    weights = sum(weight_bytes(profile, piece) for piece in slices)
    buffers = sum(buffer_bytes(profile, piece) for piece in slices)
    return Memory(weights, *at(worst), buffers), worst
