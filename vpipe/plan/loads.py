"""The loads of a schedule: minibatches in flight and weight versions, for every place that a stage may have.

A stage's place is told by the ranks from it to the pipeline's end and by its own replicas: so many minibatches
pass a rank before the first comes back,

    in flight = ceil(ranks from here on / replicas)

whatever the stages behind it look like. PipeDream has as many versions of the weights, 2BW two; the
synchronous schedules have one. GPipe has all of a rank's minibatches in flight. Whether gradients are fresh does depend
on the other stages: among any replicas they are taken not to be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from vpipe.plan.model import Load
from vpipe.schedule import Op, Schedule, build

AT_ONCE = ("pipedream", "vpipe")
"""They update after every minibatch of a rank, if all stages have as many replicas."""
CHUNKED = ("interleaved", "zb-v")
EVEN = (*CHUNKED, "zb-h1")  # their holdings are known only for the whole, and with equal replicas


@dataclass(frozen=True)
class Loads:
    """The loads that a search may choose from, by (ranks from here on, replicas)."""

    ranks: int
    loads: tuple[Load, ...]
    index: Mapping[tuple[int, int], int]
    """The place in `loads`."""


def staircase_loads(name: str, ranks: int, minibatches: int | None) -> Loads:
    """For gpipe, 1f1b, pipedream, vpipe and 2bw: any replicas on any stage."""
    return _numbered(
        ranks,
        {
            (behind, replicas): staircase_load(name, ranks, behind, replicas, minibatches)
            for behind in range(1, ranks + 1)
            for replicas in range(1, min(behind, minibatches or behind) + 1)
        },
    )


def equal_loads(name: str, ranks: int, replicas: int, minibatches: int | None) -> Loads:
    """The same with so many replicas on every stage, which makes gradients fresh in those that update at once."""
    found = {
        (behind, replicas): staircase_load(name, ranks, behind, replicas, minibatches)
        for behind in range(replicas, ranks + 1, replicas)
    }
    fresh = name in AT_ONCE
    return _numbered(
        ranks, {place: load._replace(fresh=load.fresh or fresh) for place, load in found.items()}
    )


def staircase_load(name: str, ranks: int, behind: int, replicas: int, minibatches: int | None) -> Load:
    ahead = -(-behind // replicas)
    if name in AT_ONCE:
        # An update follows every minibatch of the stage with the most replicas; others have no more.
        return Load(replicas, ahead, ahead, 0, False, 1.0, ranks)
    if name == "2bw":
        interval = two_versions_interval(ranks)
        return Load(
            replicas, ahead, min(ahead, 2), 0, False, interval / replicas, 2, fresh=interval == replicas
        )
    own = -(-(minibatches or 1) // replicas)
    return Load(replicas, own if name == "gpipe" else min(own, ahead), 1, 0, False, own)


def two_versions_interval(ranks: int) -> int:
    """An update interval that 2BW allows for all replicas of so many ranks: no more are ever in flight."""
    return ranks


def even_loads(name: str, positions: int, replicas: int, minibatches: int) -> Loads:
    """For zb-h1: as the schedule itself holds them, with equal replicas everywhere."""
    held = schedule_loads(name, positions, replicas, minibatches, None)
    ranks = positions * replicas
    return _numbered(ranks, {(ranks - stage * replicas, replicas): load for stage, load in enumerate(held)})


@lru_cache(maxsize=64)
def schedule_loads(
    name: str, positions: int, replicas: int, minibatches: int, chunks: int | None
) -> tuple[Load, ...]:
    """The load of each stage, read from the programs; they update when nothing is in flight: there is one version."""
    schedule = build(name, positions, minibatches, chunks=chunks, replicas=[replicas] * positions)
    assert schedule.synchronous
    own = -(-minibatches // replicas)
    return tuple(
        Load(replicas, found.in_flight, 1, found.waiting, found.split, own) for found in _counts(schedule)
    )


@dataclass
class _Count:
    """The most minibatches of a rank of a stage before and behind their I, while one runs F, B or I."""

    in_flight: int = 0
    waiting: int = 0
    split: bool = False


def _counts(schedule: Schedule) -> list[_Count]:
    """Of each stage's first rank: of its replicas none has more minibatches."""
    F, B, I, W = Op.F, Op.B, Op.I, Op.W  # noqa: E741 (members are slow to look up)
    found = [_Count() for _ in range(schedule.num_stages)]
    for rank in sorted({ranks[0] for ranks in schedule.placement}):
        now = {stage: [0, 0] for stage in schedule.stages_of(rank)}
        for stage, op, _ in schedule.program(rank):
            most, own = found[stage], now[stage]
            if op is F:
                own[0] += 1
            if op is F or op is I:
                most.in_flight = max(most.in_flight, own[0])
                most.waiting = max(most.waiting, own[1])
            if op is I or op is B:
                own[0] -= 1
            if op is I:
                own[1] += 1
                most.split = True
            elif op is W:
                own[1] -= 1
    return found


def _numbered(ranks: int, found: Mapping[tuple[int, int], Load]) -> Loads:
    numbers: dict[Load, int] = {}
    index = {place: numbers.setdefault(load, len(numbers)) for place, load in found.items()}
    return Loads(ranks, tuple(numbers), index)
