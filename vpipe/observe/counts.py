"""What a stage held at any time, from the record of its actions: minibatches in flight and weight versions.

A minibatch is in flight from its F to the end of its B, or of its W where backward is split. A version is held while
it is the newest, or while a minibatch that read it waits for the backward that reads it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from vpipe.record.events import NO_VERSION, Recorded
from vpipe.schedule import Op


class Count(NamedTuple):
    """From this time on."""

    time: float
    in_flight: int
    versions: int


def counts(actions: Sequence[Recorded], stage: int) -> Iterator[Count]:
    """Each change of what a stage of this rank held; evaluation holds nothing."""
    own = [entry for entry in actions if entry.action.stage == stage and not entry.evaluation]
    reading = _before(own)  # minibatch ▶ the version that its backward will read
    flying = set(reading)
    newest = next((entry.version for entry in own if entry.version != NO_VERSION), NO_VERSION)
    last: tuple[int, int] | None = None
    for entry in own:
        _, op, minibatch = entry.action
        time = entry.end
        if op is Op.F:
            flying.add(minibatch)
            reading[minibatch] = newest = entry.version
            time = entry.start
        elif op is Op.STEP:
            newest = entry.version
        if op in (Op.B, Op.I):
            reading.pop(minibatch, None)
        if op in (Op.B, Op.W):
            flying.discard(minibatch)
        now = (len(flying), len({newest, *reading.values()} - {NO_VERSION}))
        if now != last:
            yield Count(time, *now)
            last = now


def most(actions: Sequence[Recorded], stage: int) -> tuple[int, int]:
    """The most minibatches in flight and weight versions that a stage of this rank held."""
    held = list(counts(actions, stage))
    return max((c.in_flight for c in held), default=0), max((c.versions for c in held), default=0)


def _before(actions: Sequence[Recorded]) -> dict[int, int]:
    """Minibatches whose F is older than the record: their backward is in it."""
    forward: set[int] = set()
    found: dict[int, int] = {}
    for entry in actions:
        _, op, minibatch = entry.action
        if op is Op.F:
            forward.add(minibatch)
        elif op in (Op.B, Op.I, Op.W) and minibatch not in forward:
            found.setdefault(minibatch, entry.version)
    return found
