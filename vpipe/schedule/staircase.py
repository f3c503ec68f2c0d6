"""The staircase: forwards ahead, then one forward and one backward in turn, then the backwards that are left.

    stage 0   F0 F1 F2 F3 B0 F4 B1 F5 B2 ...       depth 3
    stage 1      F0 F1 F2 B0 F3 B1 F4 ...          depth 2
    stage 2         F0 F1 B0 F2 B1 ...             depth 1
    stage 3            F0 B0 F1 B1 ...             depth 0

These depths keep all ranks busy if messages take no time. More (6, 4, 2, 0) hide the time of messages, for more
memory and, in asynchronous schedules, more versions of the weights.

GPipe is the staircase of endless depth. ZB-H1 is the one whose backwards are split: the input gradient leaves
before the weight gradient is made, and stage s is s weight gradients behind, which fill its share of the last
bubble; so every stage holds as much as the first, and no stage more than 1F1B's first. With twice the depth (6, 4, 2,
0) stage s is 2 s weight gradients behind: that is ZB-2p, which has no bubble at all. PipeDream and 2BW are the ones
that update before the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from vpipe.errors import ScheduleError
from vpipe.schedule.action import Action, Op
from vpipe.schedule.kind import PipelineShape, PlaceHolding, ScheduleKind
from vpipe.schedule.program import Exists, Placement, Schedule


def depths(replicas: Sequence[int]) -> list[int]:
    """How many of its own minibatches a rank of each stage runs forward before its first F, B pair.

    A stage of R ranks must keep all ranks from itself to the end busy, R minibatches with each of its turns.
    """
    return [(sum(replicas[stage:]) - 1) // replicas[stage] for stage in range(len(replicas))]


def staircase(
    placement: Placement,
    depth: Sequence[int] | None,
    behind: Sequence[int] | None,
    interval: int,
    rank: int,
    exists: Exists,
) -> Iterator[Action]:
    """One rank's program; `depth` None is endless, `interval` the number of minibatches of an update.

    `behind`: how many weight gradients each stage is late; None: backwards are not split.
    """
    F, B, I, W = Op.F, Op.B, Op.I, Op.W  # noqa: E741 (members are slow to look up)
    make = partial(tuple.__new__, Action)  # as Action(...) does, without its detour
    stage, replica = stage_of(placement, rank)
    count = len(placement[stage])
    forward = backward = replica
    group_end = (backward // interval + 1) * interval
    ahead = None if depth is None else replica + depth[stage] * count
    most_late = None if behind is None else behind[stage]
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
        if most_late is not None:
            yield make((stage, I, backward))
            late.append(backward)
            if len(late) > most_late:
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


def stage_of(placement: Placement, rank: int) -> tuple[int, int]:
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


def make(ahead: bool, split: bool, shape: PipelineShape) -> Schedule:
    """`ahead`: whether a stage runs only as many minibatches ahead as keep the ranks behind it busy."""
    usual = tuple(depths(shape.replicas))
    depth = shape.depth or usual
    behind = weight_gradients_behind(usual, depth) if split else None
    order = partial(staircase, shape.placement, depth if ahead else None, behind, shape.update_interval)
    return shape._replace(depth=None if depth == usual else depth).schedule(order)


def weight_gradients_behind(usual: Sequence[int], depth: Sequence[int]) -> list[int]:
    """As many more than on the first stage as its depth is less: stage s is s behind with the usual depths."""
    more = [chosen - own for chosen, own in zip(depth, usual, strict=True)]
    return [max(0, stage + more[0] - own) for stage, own in enumerate(more)]


def all_held(ranks: int, behind: int, replicas: int, minibatches: int, interval: int) -> PlaceHolding:
    return PlaceHolding(minibatches)


def depth_held(ranks: int, behind: int, replicas: int, minibatches: int, interval: int) -> PlaceHolding:
    return PlaceHolding(min(minibatches, -(-behind // replicas)))


def stale_held(ranks: int, behind: int, replicas: int, minibatches: int, interval: int) -> PlaceHolding:
    """As many minibatches pass a rank before the first comes back as there are ranks behind it.

    They lie `replicas` apart, and there is a version for each update that is made between the first and the last.
    """
    in_flight = -(-behind // replicas)
    span = (in_flight - 1) * replicas
    versions = 1 + -(-span // max(interval, replicas))
    return PlaceHolding(in_flight, versions, lag=1 + -(-(ranks - 1) // interval))


def two_versions(replicas: Sequence[int], depth: Sequence[int] | None, wanted: int | None) -> int:
    """The interval of 2BW: two versions are enough if all that was in flight at an update is done at the next one."""
    ahead = (count * own for count, own in zip(replicas, depth or depths(replicas), strict=True))
    smallest = max(*replicas, *ahead)
    if wanted is not None and wanted < smallest:
        raise ScheduleError(
            f"update_interval {wanted} is too short for two versions of the weights: "
            f"with {'these stages' if depth is None else 'this depth'} schedule '2bw' needs at least {smallest}"
        )
    return wanted or max(len(replicas), smallest)


GPIPE = ScheduleKind(
    "gpipe", synchronous=True, make=partial(make, False, False), replicas="any", holding=all_held
)
ONE_F_ONE_B = replace(GPIPE, name="1f1b", make=partial(make, True, False), any_depth=True, holding=depth_held)
ZB_H1 = replace(ONE_F_ONE_B, name="zb-h1", make=partial(make, True, True), holding=None)
VPIPE = replace(ONE_F_ONE_B, name="vpipe", synchronous=False, holding=stale_held)
PIPEDREAM = replace(VPIPE, name="pipedream")
TWO_BW = replace(VPIPE, name="2bw", interval=two_versions)
