"""The V-shaped zero-bubble order: two chunks a rank, down the ranks and up again, backward the same way back.

    rank 0     stage 0      stage 2P-1
    rank 1     stage 1      stage 2P-2
    ...
    rank P-1   stage P-1    stage P

The rank that waits longest for the gradient of its first chunk waits least for that of its second, so every
rank holds at most 2P chunks: the memory of 1F1B's first rank. Weight gradients fill the gaps. With F = I = W
no rank idles between its first and its last action, if there are minibatches enough to fill the V.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import lru_cache, partial
from itertools import chain, repeat

from vpipe.schedule.action import Action, Op
from vpipe.schedule.kind import PipelineShape, ScheduleKind
from vpipe.schedule.program import Exists, Placement, Schedule


def zero_bubble_v(
    positions: int, minibatches: int, replicas: int, rank: int, exists: Exists
) -> Iterator[Action]:
    """One rank's program. All replicas k together are a pipeline of their own: minibatches k, k + R, ..."""
    position, replica = divmod(rank, replicas)
    own = len(range(replica, minibatches, replicas))
    program = (
        full_v(positions, own, position) if fills_v(positions, own) else small_v(positions, own)[position]
    )
    if replicas == 1:
        yield from program
    else:
        yield from (Action(stage, op, minibatch * replicas + replica) for stage, op, minibatch in program)
    for stage in (2 * positions - 1 - position, position):
        yield Action(stage, Op.STEP, minibatches - 1)


def fills_v(positions: int, minibatches: int) -> bool:
    """Whether the order of `full_v` is as short as any can be, 6 M + P - 1 units: below that it takes 4 M + 4 P - 2."""
    return 2 * minibatches >= 3 * positions - 1


def full_v(positions: int, minibatches: int, rank: int) -> Iterator[Action]:
    """A rank's program where the minibatches fill the V (capitals: second chunk).

    Fewer than 2P - 1 keep the places of those that do not exist.

    f f f ...            until the first minibatch is back from the ranks below
    F f  F f ...         until its gradient is back from the ranks above
    F I W  F I W ...     until the gradient of the first chunk is there
    f i w F I W ...      the steady state; at its end f, then F run out
    i I  i I ...         gradients that others wait for come first,
    i w  i w ... w w     weight gradients last
    """
    f, i, w, F, I, W = range(6)  # noqa: E741 (places in `kinds` and `count`)
    stages = (rank, 2 * positions - 1 - rank)
    kinds = [(stage, op) for stage in stages for op in (Op.F, Op.I, Op.W)]
    count = [0] * 6
    below, steady = positions - rank, max(minibatches, 2 * positions - 1) - positions
    make = partial(tuple.__new__, Action)  # as Action(...) does, without its detour
    for kind in chain(
        [f] * (2 * below - 1),
        [F, f] * rank,
        [F, I, W] * below,
        chain.from_iterable(repeat((f, i, w, F, I, W), steady)),
        [i, I] * rank,
        [i, w] * below,
        [W] * rank,
        [w] * rank,
    ):
        done = count[kind]
        if done < minibatches:
            count[kind] = done + 1
            stage, op = kinds[kind]
            yield make((stage, op, done))


@lru_cache(maxsize=8)
def small_v(positions: int, minibatches: int) -> list[list[Action]]:
    """The programs of all ranks for fewer minibatches than fill the V.

    They are found by running the pipeline in steps of one unit, each rank taking the first that it can of: an
    input gradient; a forward of its second chunk; a forward of its first chunk; a weight gradient.
    """
    stages = limit = 2 * positions
    forwards, inputs = [0] * stages, [0] * stages
    held = [0] * positions
    owed: list[deque[Action]] = [deque() for _ in range(positions)]
    programs: list[list[Action]] = [[] for _ in range(positions)]

    def choose(rank: int) -> Action | None:
        first, second = rank, stages - 1 - rank
        for stage in (second, first):
            done = inputs[stage]
            if done < forwards[stage] and (stage == stages - 1 or done < inputs[stage + 1]):
                return Action(stage, Op.I, done)
        if held[rank] < limit and forwards[second] < forwards[second - 1]:
            return Action(second, Op.F, forwards[second])
        # One place is kept for the second chunk, without which nothing would ever be freed.
        if held[rank] < limit - 1 and forwards[first] < (forwards[first - 1] if first else minibatches):
            return Action(first, Op.F, forwards[first])
        return owed[rank][0] if owed[rank] else None

    left = stages * minibatches
    while left:
        for rank, action in enumerate([choose(rank) for rank in range(positions)]):
            if action is None:
                continue
            programs[rank].append(action)
            if action.op is Op.F:
                forwards[action.stage] += 1
                held[rank] += 1
            elif action.op is Op.I:
                inputs[action.stage] += 1
                owed[rank].append(Action(action.stage, Op.W, action.minibatch))
            else:
                owed[rank].popleft()
                held[rank] -= 1
                left -= 1
    return programs


def make(shape: PipelineShape) -> Schedule:
    positions, replicas = len(shape.replicas), shape.replicas[0]
    placement: Placement = (*shape.placement, *reversed(shape.placement))
    assert shape.minibatches is not None
    order = partial(zero_bubble_v, positions, shape.minibatches, replicas)
    return shape.schedule(order, placement, lazy=False)


ZB_V = ScheduleKind("zb-v", synchronous=True, make=make, chunks=2, replicas="equal")
