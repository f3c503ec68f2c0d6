"""The moments at which a rank with several slices holds most: how many minibatches of each, at the same time.

    zb-v, 4 ranks, rank 0     of its first chunk 7 are in flight when none of its second is,
                              and 4 when of its second there are 4

Each slice's own most (`Load`) would add up to more than the rank ever holds. A moment is one that no other exceeds in
all counts; memory is linear in them, so its most is found at one of these few.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from operator import ge
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vpipe.cost import POLICIES, Profile, held_bytes
from vpipe.plan.model import (
    Slice,
    StageMemory,
    buffer_bytes,
    drained_update_bytes,
    running_bytes,
    weight_bytes,
)
from vpipe.schedule import Op, Schedule
from vpipe.schedule.facts import sample

Counts = npt.NDArray[np.int64]
LARGEST = 2**62
"""Bytes that are counted in 64 bits; more are counted by Python."""


class Moment(NamedTuple):
    running: int | None
    """The place, among the rank's slices, of the one whose backward runs."""
    counts: tuple[tuple[int, int], ...]
    """Of each slice: minibatches in flight, and those between the end of their I and that of their W."""


class Moments(tuple[Moment, ...]):
    """Those of one rank."""

    @cached_property
    def counts(self) -> Counts:
        """In flight and waiting, each by moment and slice."""
        return np.moveaxis(np.array([moment.counts for moment in self]), -1, 0)

    @cached_property
    def running(self) -> Counts:
        """-1: no backward."""
        return np.array([-1 if moment.running is None else moment.running for moment in self])


@lru_cache(maxsize=64)
def schedule_moments(schedule: Schedule) -> tuple[Moments, ...]:
    """Those of each position, over all its ranks."""
    shown = sample(schedule)
    return tuple(moments(shown, ranks) for ranks in sorted(set(shown.placement)))


def moments(schedule: Schedule, ranks: Iterable[int]) -> Moments:
    seen: dict[tuple[int, ...], None] = {}
    for rank in ranks:
        seen.update(_seen(schedule, rank))
    return Moments(
        Moment(None if running < 0 else running, tuple(zip(counts[::2], counts[1::2], strict=True)))
        for running, *counts in _largest(seen)
    )


def _seen(schedule: Schedule, rank: int) -> dict[tuple[int, ...], None]:
    """The slice whose backward runs (-1: none) and all counts, each once."""
    F, B, I, W = Op.F, Op.B, Op.I, Op.W  # noqa: E741 (members are slow to look up)
    place = {stage: number for number, stage in enumerate(schedule.stages_of(rank))}
    now = [0] * (2 * len(place))  # of each slice in flight, waiting
    seen: dict[tuple[int, ...], None] = {}
    for stage, op, _ in schedule.program(rank):
        own = place[stage]
        if op is F:
            now[2 * own] += 1
            seen.setdefault((-1, *now))
        elif op is B:
            seen.setdefault((own, *now))
            now[2 * own] -= 1
        elif op is I:
            seen.setdefault((own, *now))
            now[2 * own] -= 1
            now[2 * own + 1] += 1
        elif op is W:
            now[2 * own + 1] -= 1
    return seen


def _largest(seen: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Those, of the slice that runs and all counts, that no other of the same running slice exceeds."""
    largest: dict[int, list[tuple[int, ...]]] = {}
    found: list[tuple[int, ...]] = []
    for moment in sorted(seen, key=lambda moment: -sum(moment[1:])):
        larger = largest.setdefault(moment[0], [])
        if not any(all(map(ge, other, moment)) for other in larger):
            larger.append(moment)
            found.append(moment)
    return found


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
    profile: Profile, slices: Sequence[Slice], policies: Sequence[Sequence[str]], offered: Moments
) -> tuple[StageMemory, Moment]:
    """What the rank holds at the worst of these moments, and which that is."""
    held, swapped, deferred, backward = [], [], [], []
    for piece, chosen in zip(slices, policies, strict=True):
        numbers = range(piece.start, piece.stop)
        sizes = [held_bytes(profile.blocks, n, policy) for n, policy in zip(numbers, chosen, strict=True)]
        sent = [POLICIES[name].copied(profile.blocks[n]) for n, name in zip(numbers, chosen, strict=True)]
        moved = sum(size for size, bytes_ in zip(sizes, sent, strict=True) if bytes_)
        held.append(sum(sizes) - moved)
        swapped.append(moved)
        deferred.append(sum(profile.blocks[number].deferred for number in numbers))
        backward.append(running_bytes(profile, piece, chosen))
    backward.append(0)  # where none runs
    most = max(piece.load.in_flight + piece.load.waiting for piece in slices)
    large = most * sum(map(sum, (held, swapped, deferred, backward))) >= LARGEST
    kept, copied, left, needed = (
        np.array(sizes, dtype=object if large else np.int64) for sizes in (held, swapped, deferred, backward)
    )
    flying, waiting = offered.counts
    lying = np.minimum(flying + profile.device.lingering, profile.device.swapped_in)
    activations = flying @ kept + lying @ copied + waiting @ left
    needs = needed[offered.running]
    worst = int(np.argmax(activations + needs))
    weights = sum(weight_bytes(profile, piece) for piece in slices)
    buffers = profile.device.workspace + sum(buffer_bytes(profile, piece) for piece in slices)
    held_then = int(activations[worst])
    needed_then = max(int(needs[worst]), drained_update_bytes(profile, slices, sum(swapped)) - held_then)
    return StageMemory(weights, held_then, needed_then, buffers), offered[worst]
