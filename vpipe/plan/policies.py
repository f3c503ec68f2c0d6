"""The choice of keep, recompute or swap for each block of a rank: the least time that fits the memory.

Blocks with equal figures are one group, and `branch.py` chooses counts. That leaves out what a running backward
needs, which depends on the order of the blocks. Where the counts fit with it as well they are the best; where they
do not, blocks are searched one by one (`exact.py`). Few are searched to the end. For many, room is set aside until the
counts fit, and the search looks for something better for `STEPS` steps: most models have a few kinds of blocks, and
then that is to the end as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from vpipe.cost import KEEP, RECOMPUTE, SWAP, Profile, input_bytes, update_bytes
from vpipe.plan.branch import GAP, Search, efficiency
from vpipe.plan.exact import BlockSearch
from vpipe.plan.groups import Members, Policies, ceilings, group_blocks, placed, saving_most
from vpipe.plan.model import (
    Slice,
    buffer_bytes,
    drained_update_bytes,
    fixed_seconds,
    host_bandwidth,
    stage_memory,
    stage_time,
    waiting_bytes,
    weight_bytes,
)

FEW = 10
"""So many blocks are always worth an exact choice."""
MANY = 300
"""With more, not even a short search."""
STEPS = 5000
CEILINGS = 8
"""Of models with more sizes of blocks not each is tried as the largest to be recomputed."""

Choice = tuple[float, Policies]


def choose(profile: Profile, slices: Sequence[Slice], memory: int) -> Choice | None:
    """The least time, without the link's, and the policies that give it; None if nothing fits `memory`."""
    compute = compute_seconds(profile, slices)
    keeping: Policies = [[KEEP] * (piece.stop - piece.start) for piece in slices]
    if stage_memory(profile, slices, keeping).total <= memory:
        return compute, keeping
    if always_bytes(profile, slices) + drained_update_bytes(profile, slices) > memory:
        return None
    members = group_blocks(profile, slices)
    bound = _by_counts(profile, slices, members, memory, _least_backward(profile, slices), inf)
    if bound is None or stage_memory(profile, slices, bound[1]).total <= memory:
        return bound
    limit, steps, known = inf, inf, None
    if not _few(slices):
        known = _with_room(profile, slices, members, memory)
        if _count(slices) > MANY:
            return known
        limit, steps = inf if known is None else known[0], STEPS
    search = BlockSearch(profile, slices, compute, host_bandwidth(profile))
    found = search.fastest(memory - fixed_bytes(profile, slices), bound[0], limit, steps)
    return known if found is None else (found[0], _by_slice(found[1], slices))


def _by_counts(
    profile: Profile,
    slices: Sequence[Slice],
    members: Sequence[Members],
    memory: int,
    room: int,
    limit: float,
) -> Choice | None:
    """The best counts below `limit` seconds that leave `room` bytes for the running backward."""
    ordered = sorted(members, key=lambda found: (-efficiency(found.group), found.places))
    search = Search(compute_seconds(profile, slices), host_bandwidth(profile), 0.0 if _few(slices) else GAP)
    search.seconds = limit
    search.set_limit()
    need = bytes_of_keeping(profile, slices) + room - memory
    counts = search.improve([found.group for found in ordered], need)
    return None if counts is None else (search.seconds, placed(slices, ordered, counts))


def _with_room(
    profile: Profile, slices: Sequence[Slice], members: Sequence[Members], memory: int
) -> Choice | None:
    """The best of those where the room set aside is enough, under some ceilings for what is recomputed."""
    best: Choice | None = None
    offered = list(ceilings(members))
    for allowed in offered[:: -(-len(offered) // CEILINGS)]:
        room, needed = -1, _least_backward(profile, slices)
        while needed > room:
            room = needed
            found = _by_counts(profile, slices, allowed, memory, room, inf if best is None else best[0])
            if found is None:
                break
            need = stage_memory(profile, slices, found[1])
            if need.total <= memory:
                best = found
                break
            needed = need.backward
    if best is not None:
        return best
    policies = _smallest(profile, slices, members)
    time = stage_time(profile, slices, policies)
    fits = stage_memory(profile, slices, policies).total <= memory
    return (max(time.compute, time.host), policies) if fits else None


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
    """The smallest memory in which the slices run at all; of many blocks, that `choose` finds."""
    members = group_blocks(profile, slices)
    least = stage_memory(profile, slices, _smallest(profile, slices, members)).total
    if not _few(slices):
        return least
    fixed = fixed_bytes(profile, slices)
    return fixed + BlockSearch(profile, slices, 0.0, 1.0).smallest(least - fixed)


def _smallest(profile: Profile, slices: Sequence[Slice], members: Sequence[Members]) -> Policies:
    """The policies that save most, under the best ceiling for what is recomputed."""
    offered = [placed(slices, allowed, saving_most(allowed)) for allowed in ceilings(members)]
    return min(offered, key=lambda policies: stage_memory(profile, slices, policies).total)


def _least_backward(profile: Profile, slices: Sequence[Slice]) -> int:
    """What a running backward needs under any policies: that of a last block finds nothing given back yet.

    When it ends, no more than all was given back; fresh gradients are there then, and an update may follow.
    """
    blocks, most = profile.blocks, 0
    for piece in slices:
        most = max(most, blocks[piece.stop - 1].working_bytes)
        if piece.load.asynchronous:
            gone = sum(
                max(blocks[number].kept_bytes, input_bytes(blocks, number))
                for number in range(piece.start, piece.stop)
            )
            left = profile.parameter_bytes(piece.start, piece.stop) if piece.load.fresh else 0
            most = max(most, update_bytes(blocks[piece.start : piece.stop]) + left - gone)
    return most


def _count(slices: Sequence[Slice]) -> int:
    return sum(piece.stop - piece.start for piece in slices)


def _few(slices: Sequence[Slice]) -> bool:
    return _count(slices) <= FEW


def _by_slice(policies: Sequence[str], slices: Sequence[Slice]) -> Policies:
    remaining = iter(policies)
    return [[next(remaining) for _ in range(piece.start, piece.stop)] for piece in slices]


def fixed_bytes(profile: Profile, slices: Sequence[Slice]) -> int:
    """What no policy changes."""
    return always_bytes(profile, slices) + waiting_bytes(profile, slices)


def always_bytes(profile: Profile, slices: Sequence[Slice]) -> int:
    """What is there without any minibatch."""
    own = sum(weight_bytes(profile, piece) + buffer_bytes(profile, piece) for piece in slices)
    return profile.device.workspace + own


def bytes_of_keeping(profile: Profile, slices: Sequence[Slice]) -> int:
    """Without what a running backward needs."""
    return fixed_bytes(profile, slices) + sum(
        piece.load.in_flight * sum(block.kept_bytes for block in profile.blocks[piece.start : piece.stop])
        for piece in slices
    )


def compute_seconds(profile: Profile, slices: Sequence[Slice]) -> float:
    return sum(
        sum(block.forward + block.backward for block in profile.blocks[piece.start : piece.stop])
        + fixed_seconds(profile, piece)
        for piece in slices
    )
