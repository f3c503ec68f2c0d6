"""The staircase: forwards ahead, then one forward and one backward in turn, then the backwards that are left.

    stage 0   F0 F1 F2 F3 B0 F4 B1 F5 B2 ...       depth 3
    stage 1      F0 F1 F2 B0 F3 B1 F4 ...          depth 2
    stage 2         F0 F1 B0 F2 B1 ...             depth 1
    stage 3            F0 B0 F1 B1 ...             depth 0

GPipe is the staircase of endless depth. ZB-H1 is the one whose backwards are split: the input gradient leaves
before the weight gradient is made, and stage s is s weight gradients behind, which fill its share of the last
bubble; so every stage holds as much as the first, and no stage more than 1F1B's first. PipeDream and 2BW are the
ones that update before the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial

from vpipe.schedule.action import Action, Op
from vpipe.schedule.program import Exists

Placement = tuple[tuple[int, ...], ...]


def depths(replicas: Sequence[int]) -> list[int]:
    """How many of its own minibatches a rank of each stage runs forward before its first F, B pair.

    A stage of R ranks must keep all ranks from itself to the end busy, R minibatches with each of its turns.
    """
    return [(sum(replicas[stage:]) - 1) // replicas[stage] for stage in range(len(replicas))]


def staircase(
    placement: Placement, depth: Sequence[int] | None, split: bool, interval: int, rank: int, exists: Exists
) -> Iterator[Action]:
    """One rank's program; `depth` None is endless, `interval` the number of minibatches of an update."""
    F, B, I, W = Op.F, Op.B, Op.I, Op.W  # noqa: E741 (members are slow to look up)
    make = partial(tuple.__new__, Action)  # as Action(...) does, without its detour
    stage, replica = seat(placement, rank)
    count = len(placement[stage])
    forward = backward = replica
    group_end = (backward // interval + 1) * interval
    ahead = None if depth is None else replica + depth[stage] * count
    late: deque[int] = deque()  # minibatches whose weight gradients are still to be made
    more = True
    while more or backward < forward:
        if more := more and exists(forward):
            yield make((stage, F, forward))
            forward += count
            if ahead is None or forward <= ahead:
                continue
        if backward >= forward:
            break
        if split:
            yield make((stage, I, backward))
            late.append(backward)
            if len(late) > stage:
                yield make((stage, W, late.popleft()))
        else:
            yield make((stage, B, backward))
        following = backward + count
        if following >= group_end or not exists(following):
            group_end = (following // interval + 1) * interval
            yield from (Action(stage, W, minibatch) for minibatch in late)
            late.clear()
            yield Action(stage, Op.STEP, last_of_group(backward, interval, exists))
        backward = following
    # The last group may be too short to hold a minibatch of this rank: its update is made all the same.
    last = last_existing(backward - count, exists)
    if last >= 0 and last // interval != (backward - count) // interval:
        yield Action(stage, Op.STEP, last)


def seat(placement: Placement, rank: int) -> tuple[int, int]:
    """The stage of `rank`, and its place among the stage's replicas."""
    return next((stage, ranks.index(rank)) for stage, ranks in enumerate(placement) if rank in ranks)


def last_of_group(minibatch: int, interval: int, exists: Exists) -> int:
    while (minibatch + 1) % interval and exists(minibatch + 1):
        minibatch += 1
    return minibatch


def last_existing(minibatch: int, exists: Exists) -> int:
    """The last minibatch of the data, from one that exists (or a negative number) on."""
    minibatch = max(minibatch, -1)
    while exists(minibatch + 1):
        minibatch += 1
    return minibatch
