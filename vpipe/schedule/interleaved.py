"""The interleaved order: v chunks of the model on each rank, run in rounds of P minibatches.

    forward     chunk 0 of minibatches 0..P-1, chunk 1 of the same, ..., chunk 0 of minibatches P..2P-1, ...
    backward    the same rounds, chunks from last to first

Each rank walks the forward sequence some way ahead, then takes from both in turn. A short last round keeps
the places of the minibatches that do not exist: what cannot deadlock with all of them cannot without some.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice, zip_longest

from vpipe.schedule.action import Action, Op
from vpipe.schedule.program import Exists
from vpipe.schedule.staircase import last_existing


def interleaved(positions: int, chunks: int, replicas: int, rank: int, exists: Exists) -> Iterator[Action]:
    """One rank's program. All replicas k together are a pipeline of their own: minibatches k, k + R, ..."""
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
