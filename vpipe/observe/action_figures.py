"""Figures from the recorded actions of a run: minibatches, versions and bytes that stages held, and median times.

A minibatch is in flight from its F to the end of its B, or of its W where backward is split. A version is held while
it is the newest, or while a minibatch that read it waits for the backward that reads it again. The bytes of a rank are

    weights + optimizer state                                   always
    + gradients                                                 from a first backward to the end of its update
    + minibatches in flight x bytes of the first one            counted once (`vpipe.observe.held_bytes`)
    + older weight versions x weights

without libraries, message buffers and temporary memory of operations, which the sampled memory of the process has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from vpipe.record.events import NO_VERSION, RankEvents, Recorded, read_events
from vpipe.schedule import Op


class Count(NamedTuple):
    """From this time on."""

    time: float
    in_flight: int
    versions: int


def counts(actions: Sequence[Recorded], stage: int) -> Iterator[Count]:
    """Each change of the minibatches and versions that a stage of this rank held; evaluation holds none."""
    own = [entry for entry in actions if entry.action.stage == stage and not entry.evaluation]
    reading = _earlier_forwards(own)  # minibatch ▶ the version that its backward will read
    in_flight = set(reading)
    newest = next((entry.version for entry in own if entry.version != NO_VERSION), NO_VERSION)
    last: tuple[int, int] | None = None
    for entry in own:
        _, op, minibatch = entry.action
        time = entry.end
        if op is Op.F:
            in_flight.add(minibatch)
            reading[minibatch] = newest = entry.version
            time = entry.start
        elif op is Op.STEP:
            newest = entry.version
        if op in (Op.B, Op.I):
            reading.pop(minibatch, None)
        if op in (Op.B, Op.W):
            in_flight.discard(minibatch)
        now = (len(in_flight), len({newest, *reading.values()} - {NO_VERSION}))
        if now != last:
            yield Count(time, *now)
            last = now


def seconds_of_updates(folder: Path) -> list[float]:
    """From each recorded update of a run to the next, on its first rank; evaluations and saves are in between."""
    ranks = read_events(folder)
    steps = [entry for entry in ranks[0].actions if entry.action.op is Op.STEP] if ranks else []
    ends = [entry.end for entry in steps if entry.action.stage == steps[0].action.stage]
    return [after - before for before, after in pairwise(ends)]


def most(actions: Sequence[Recorded], stage: int) -> tuple[int, int]:
    """The most minibatches in flight and weight versions that a stage of this rank held."""
    held = list(counts(actions, stage))
    return max((c.in_flight for c in held), default=0), max((c.versions for c in held), default=0)


def _earlier_forwards(actions: Sequence[Recorded]) -> dict[int, int]:
    """Minibatches whose F is older than the record, with the version that their backward reads."""
    forward: set[int] = set()
    found: dict[int, int] = {}
    for entry in actions:
        _, op, minibatch = entry.action
        if op is Op.F:
            forward.add(minibatch)
        elif op in (Op.B, Op.I, Op.W) and minibatch not in forward:
            found.setdefault(minibatch, entry.version)
    return found


# Versions


def check_versions(ranks: Sequence[RankEvents]) -> tuple[int, list[str], dict[int, int]]:
    """How many actions were checked, those that read or made a wrong version, and the staleness of each stage.

    The staleness is the most updates between the version that a gradient is of and the newest one.
    """
    checked, wrong, stale = 0, list[str](), dict[int, int]()
    for events in ranks:
        read: dict[tuple[int, int], int] = {}
        newest: dict[int, int] = {}
        for entry in training([events]):
            action, version = entry.action, entry.version
            stage, op, minibatch = action
            if version == NO_VERSION:
                continue
            if op is Op.F:
                checked += 1
                read[stage, minibatch] = version
                if version != newest.setdefault(stage, version):
                    wrong.append(f"{action} read version {version}, the newest was {newest[stage]}")
            elif op in (Op.B, Op.I):
                stale[stage] = max(stale.get(stage, 0), newest.get(stage, version) - version)
                if (stage, minibatch) in read:
                    checked += 1
                    seen = read.pop((stage, minibatch))
                    if version != seen:
                        wrong.append(f"{action} read version {version}, its forward {seen}")
            elif op is Op.STEP:
                checked += 1
                # Two more than before is no fault: an overflow may have skipped one.
                if version < newest.get(stage, version):
                    wrong.append(f"{action} made version {version} after {newest[stage]}")
                newest[stage] = version
    return checked, wrong, stale


# Bytes


def counted_memory(events: RankEvents) -> list[tuple[float, int]]:
    """Each change as (time, bytes from then on); empty where nothing was counted."""
    always = sum(held.weights + held.optimizer for held in events.held.values())
    now, line = dict[tuple[int, str], int](), []
    for time, place, size in sorted(_changes(events)):
        now[place] = size
        line.append((time, always + sum(now.values())))
    return line


def _changes(events: RankEvents) -> Iterator[tuple[float, tuple[int, str], int]]:
    for stage, held in events.held.items():
        for count in counts(events.actions, stage):
            size = count.in_flight * held.minibatch + max(0, count.versions - 1) * held.weights
            yield count.time, (stage, "minibatches"), size
        present = False
        for entry in events.actions:
            if entry.action.stage != stage or entry.evaluation:
                continue
            if entry.action.op in (Op.B, Op.W, Op.STEP) and present == (entry.action.op is Op.STEP):
                present = not present
                yield entry.end, (stage, "gradients"), held.weights if present else 0


# Medians

Medians = dict[tuple[int, Op], float]
"""Seconds without waiting, by stage and operation."""


def training(ranks: Iterable[RankEvents]) -> Iterable[Recorded]:
    return (entry for events in ranks for entry in events.actions if not entry.evaluation)


def medians(ranks: Iterable[RankEvents]) -> Medians:
    """Over all replicas of a stage, without evaluations."""
    found: dict[tuple[int, Op], list[float]] = defaultdict(list)
    for entry in training(ranks):
        found[entry.action.stage, entry.action.op].append(max(0.0, entry.duration - entry.wait))
    return {key: median(times) for key, times in found.items()}


def message_bytes(ranks: Iterable[RankEvents]) -> dict[tuple[int, Op], int]:
    """Bytes that a stage sends of one minibatch, by stage and operation."""
    found: dict[tuple[int, Op], list[int]] = defaultdict(list)
    for entry in training(ranks):
        if entry.action.op in (Op.SEND_F, Op.SEND_B):
            found[entry.action.stage, entry.action.op].append(entry.sent)
    return {key: round(median(sizes)) for key, sizes in found.items()}
