"""The choice of a memory policy for each block of a rank: the least time that fits the memory.

Blocks with equal options are one group, and `count_search.py` chooses counts. That leaves out what a running backward
needs, which depends on the order of the blocks. Where the counts fit with it as well they are the best; where they
do not, blocks are searched one by one (`block_search.py`). Few are searched to the end. For many, room is set aside
until the counts fit, and the search looks for something better for `STEPS` steps: most models have a few kinds of
blocks, and then that is to the end as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from vpipe.cost import KEEP, POLICIES, RECOMPUTE, Profile, input_bytes, update_bytes
from vpipe.plan.block_search import BlockSearch
from vpipe.plan.count_search import GAP, CountSearch, Prices
from vpipe.plan.model import (
    Slice,
    buffer_bytes,
    drained_update_bytes,
    fixed_seconds,
    stage_memory,
    stage_time,
    waiting_bytes,
    weight_bytes,
)
from vpipe.plan.options import Policies, SliceOptions, saving_most

FEW = 10
"""So many blocks are always worth an exact choice."""
MANY = 300
"""With more, not even a short search."""
STEPS = 5000
LIMITED = 8
"""How many sets of options are tried at most, each without those that make more again in backward than the next."""

Choice = tuple[float, Policies]


def choose(profile: Profile, slices: Sequence[Slice], memory: int) -> Choice | None:
    """The least time, without the link's, and the policies that give it; None if nothing fits `memory`."""
    compute = compute_seconds(profile, slices)
    keeping: Policies = [[KEEP] * (piece.stop - piece.start) for piece in slices]
    if stage_memory(profile, slices, keeping).total <= memory:
        return compute, keeping
    if always_bytes(profile, slices) + drained_update_bytes(profile, slices) > memory:
        return None
    offered = SliceOptions(profile, slices)
    gap, excess = 0.0 if _few(slices) else GAP, bytes_of_keeping(profile, slices) - memory
    least = _least_backward(profile, slices)
    search = CountSearch(offered.groups, excess + least, compute, gap)
    if search.counts is None:
        return None
    policies = offered.placed(search.groups, search.counts)
    if stage_memory(profile, slices, policies).total <= memory:
        return search.seconds, policies
    limit, steps, known = inf, inf, None
    if not _few(slices):
        known = _with_room(profile, offered, memory, least, compute)
        if len(offered.blocks) > MANY:
            return known
        limit, steps = inf if known is None else known[0], STEPS
    blocks = BlockSearch(profile, offered, compute, search.prices)
    found = blocks.fastest(memory - fixed_bytes(profile, slices), search.seconds, limit, steps)
    return known if found is None else (found[0], _by_slice(found[1], slices))


def _with_room(
    profile: Profile, offered: SliceOptions, memory: int, least: int, compute: float
) -> Choice | None:
    """The best counts that fit with the room that is set aside for the running backward, some options left out."""
    best: Choice | None = None
    slices, limited = offered.slices, list(offered.limited())
    excess = bytes_of_keeping(profile, slices) - memory
    for groups in limited[:: -(-len(limited) // LIMITED)]:
        room, needed = -1, least
        while needed > room:
            room = needed
            limit = inf if best is None else best[0]
            search = CountSearch(groups, excess + room, compute, GAP, limit)
            if search.counts is None:
                break
            policies = offered.placed(search.groups, search.counts)
            need = stage_memory(profile, slices, policies)
            if need.total <= memory:
                best = search.seconds, policies
                break
            needed = need.backward
    if best is not None:
        return best
    policies = _smallest(profile, offered)
    time = stage_time(profile, slices, policies)
    fits = stage_memory(profile, slices, policies).total <= memory
    return (max(time.compute, time.host), policies) if fits else None


def from_the_end(profile: Profile, piece: Slice, policies: list[str], memory: int) -> list[str]:
    """As many recomputed blocks, but the last ones, if that is as fast and fits: the guides' recompute ratio."""
    count = policies.count(RECOMPUTE)
    if count + policies.count(KEEP) < len(policies):
        return policies
    shifted = [KEEP] * (len(policies) - count) + [RECOMPUTE] * count
    if stage_memory(profile, [piece], [shifted]).total > memory:
        return policies
    seconds, shifted_seconds = (
        stage_time(profile, [piece], [chosen]).seconds for chosen in (policies, shifted)
    )
    return shifted if shifted_seconds <= seconds else policies


def least_memory(profile: Profile, slices: Sequence[Slice]) -> int:
    """The smallest memory in which the slices run at all; of many blocks, that `choose` finds."""
    offered = SliceOptions(profile, slices)
    least = stage_memory(profile, slices, _smallest(profile, offered)).total
    if not _few(slices):
        return least
    fixed = fixed_bytes(profile, slices)
    return fixed + BlockSearch(profile, offered, 0.0, Prices(1.0, 0.0)).smallest(least - fixed)


def _smallest(profile: Profile, offered: SliceOptions) -> Policies:
    """The policies that save most, with the options left out of which that is best."""
    found: list[Policies] = [offered.placed(groups, saving_most(groups)) for groups in offered.limited()]
    return min(found, key=lambda policies: stage_memory(profile, offered.slices, policies).total)


def _least_backward(profile: Profile, slices: Sequence[Slice]) -> int:
    """What a running backward needs under any policies: that of a last block finds nothing given back yet.

    When it ends, no more than all was given back; fresh gradients are there then, and an update may follow.
    """
    blocks, most = profile.blocks, 0
    for piece in slices:
        most = max(most, blocks[piece.stop - 1].working_bytes)
        if piece.load.asynchronous:
            gone = sum(
                max(policy.held(blocks[number], input_bytes(blocks, number)) for policy in POLICIES.values())
                for number in range(piece.start, piece.stop)
            )
            left = profile.parameter_bytes(piece.start, piece.stop) if piece.load.fresh else 0
            most = max(most, update_bytes(blocks[piece.start : piece.stop]) + left - gone)
    return most


def _few(slices: Sequence[Slice]) -> bool:
    return sum(piece.stop - piece.start for piece in slices) <= FEW


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
