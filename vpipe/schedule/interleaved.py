"""The interleaved order: v chunks of the model on each rank, run in rounds of P minibatches.

    forward     chunk 0 of minibatches 0..P-1, chunk 1 of the same, ..., chunk 0 of minibatches P..2P-1, ...
    backward    the same rounds, chunks from last to first

Each rank runs some forwards ahead, then takes from both sequences in turn. The first rank holds most:
2 (P - 1) + (v - 1) P + 1 chunks of minibatches.

Where P does not divide the number of minibatches, a last round of fewer than P would leave ranks idle between its
chunks. Rounds of P and a few more do not; but with the usual number of forwards ahead they could not run. Which forward
and which backward a rank runs next is then found by running the pipeline in steps of one unit, no rank holding more
than the first one usually does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from itertools import count, islice, zip_longest

from vpipe.schedule.action import Action, Op
from vpipe.schedule.kind import PipelineShape, ScheduleKind
from vpipe.schedule.program import Exists, Schedule
from vpipe.schedule.staircase import last_existing

MOST_STEPPED = 2**16
"""Forwards of all ranks, beyond which a short last round is taken: it is a small part of so many."""
Sequences = tuple[list[tuple[int, int]], list[tuple[int, int]]]
"""(chunk, minibatch) in the order of the forwards, and in that of the backwards."""


def interleaved(positions: int, chunks: int, replicas: int, rank: int, exists: Exists) -> Iterator[Action]:
    """One rank's program. All replicas k together are a pipeline of their own: minibatches k, k + R, ...

    A short last round keeps the places of the minibatches that do not exist: what cannot deadlock with all of them
    cannot without some.
    """
    position, replica = divmod(rank, replicas)

    def sequence(op: Op, chunk_order: range) -> Iterator[Action | None]:
        for start in count(replica, positions * replicas):
            if not exists(start):
                return
            for chunk in chunk_order:
                for minibatch in range(start, start + positions * replicas, replicas):
                    yield Action(chunk * positions + position, op, minibatch) if exists(minibatch) else None

    forward = sequence(Op.F, range(chunks))
    backward = sequence(Op.B, range(chunks - 1, -1, -1))
    ahead = 2 * (positions - 1 - position) + (chunks - 1) * positions
    yield from filter(None, islice(forward, ahead))
    for pair in zip_longest(forward, backward):
        yield from filter(None, pair)
    last = last_existing(-1, exists)
    for chunk in reversed(range(chunks)):
        yield Action(chunk * positions + position, Op.STEP, last)


def stepped(
    positions: int, chunks: int, replicas: int, minibatches: int, rank: int, exists: Exists
) -> Iterator[Action]:
    """One rank's program where P does not divide the minibatches."""
    position, replica = divmod(rank, replicas)
    own = len(range(replica, minibatches, replicas))
    for stage, op, minibatch in shortest(positions, chunks, own)[position] if own else ():
        yield Action(stage, op, minibatch * replicas + replica)
    for chunk in reversed(range(chunks)):
        yield Action(chunk * positions + position, Op.STEP, minibatches - 1)


@lru_cache(maxsize=8)
def shortest(positions: int, chunks: int, minibatches: int) -> list[list[Action]]:
    """The programs of all ranks with the rounds that take least time: all of nearly equal length, or all but one of P.

    The short round is the last of the forwards, and the last or the first of the backwards.
    """
    rounds = max(1, minibatches // positions)
    equal = [minibatches // rounds + (number < minibatches % rounds) for number in range(rounds)]
    short = [min(positions, minibatches - start) for start in range(0, minibatches, positions)]
    tried = (
        run_in_steps(positions, chunks, (in_rounds(ahead, chunks)[0], in_rounds(back, chunks)[1]))
        for ahead, back in ((equal, equal), (short, short), (short, short[::-1]))
    )
    _, programs = min((found for found in tried if found is not None), key=lambda found: found[0])
    return programs


def in_rounds(sizes: Sequence[int], chunks: int) -> Sequences:
    forward: list[tuple[int, int]] = []
    backward: list[tuple[int, int]] = []
    start = 0
    for size in sizes:
        minibatches = range(start, start + size)
        forward += [(chunk, minibatch) for chunk in range(chunks) for minibatch in minibatches]
        backward += [(chunk, minibatch) for chunk in reversed(range(chunks)) for minibatch in minibatches]
        start += size
    return forward, backward


def run_in_steps(positions: int, chunks: int, sequences: Sequences) -> tuple[int, list[list[Action]]] | None:
    """The makespan at F = 1 and B = 2, and the programs; None: so much memory is not enough for these sequences.

    A free rank takes the next forward if its last action was a backward, else the next backward; if that one is not
    ready, the other.
    """
    forward, backward = sequences
    limit = 2 * (positions - 1) + (chunks - 1) * positions + 1
    stages = positions * chunks
    done: dict[Action, int] = {}  # when it ends
    programs: list[list[Action]] = [[] for _ in range(positions)]
    runs, free = [[0, 0] for _ in range(positions)], [0] * positions

    def candidate(rank: int, op: Op, time: int) -> Action | None:
        forwards, backwards = runs[rank]
        if op is Op.F:
            if forwards == len(forward) or forwards - backwards == limit:
                return None
            chunk, minibatch = forward[forwards]
            stage = chunk * positions + rank
            needs = [Action(stage - 1, Op.F, minibatch)] if stage else []
        else:
            if backwards == len(backward):
                return None
            chunk, minibatch = backward[backwards]
            stage = chunk * positions + rank
            needs = [Action(stage, Op.F, minibatch)]
            needs += [Action(stage + 1, Op.B, minibatch)] if stage + 1 < stages else []
        ready = all(done.get(needed, time + 1) <= time for needed in needs)
        return Action(stage, op, minibatch) if ready else None

    time, left = 0, 2 * positions * len(forward)
    while left:
        for rank in range(positions):
            if free[rank] > time:
                continue
            program = programs[rank]
            order = (Op.F, Op.B) if program and program[-1].op is Op.B else (Op.B, Op.F)
            action = candidate(rank, order[0], time) or candidate(rank, order[1], time)
            if action is not None:
                program.append(action)
                runs[rank][action.op is Op.B] += 1
                done[action] = free[rank] = time + (2 if action.op is Op.B else 1)
                left -= 1
        if time > max(free):
            return None  # nobody works any more
        time += 1
    return max(free), programs


def make(shape: PipelineShape) -> Schedule:
    positions, replicas, minibatches = len(shape.replicas), shape.replicas[0], shape.minibatches
    assert minibatches is not None
    placement = shape.placement * shape.chunks
    forwards = positions * shape.chunks * minibatches
    if minibatches % (positions * replicas) == 0 or forwards > MOST_STEPPED:
        return shape.schedule(partial(interleaved, positions, shape.chunks, replicas), placement)
    order = partial(stepped, positions, shape.chunks, replicas, minibatches)
    return shape.schedule(order, placement, lazy=False)


INTERLEAVED = ScheduleKind(
    "interleaved", synchronous=True, make=make, chunks=2, any_chunks=True, replicas="equal"
)
