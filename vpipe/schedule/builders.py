"""The builders: schedules by name."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from functools import partial
from itertools import accumulate

from vpipe.errors import ScheduleError
from vpipe.schedule.interleaved import interleaved
from vpipe.schedule.program import Schedule
from vpipe.schedule.staircase import depths, staircase
from vpipe.schedule.zero_bubble import v_placement, zero_bubble_v

SYNCHRONOUS = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
ASYNCHRONOUS = ("pipedream", "2bw", "vpipe")
NAMES = SYNCHRONOUS + ASYNCHRONOUS
SPLIT = ("zb-h1", "zb-v")  # their backward is split into I and W
MOST_STAGES = 4096


def build(
    name: str,
    stages: int,
    minibatches: int | None,
    *,
    chunks: int | None = None,
    replicas: Sequence[int] | None = None,
    update_interval: int | None = None,
) -> Schedule:
    """The schedule `name` over `stages` pipeline positions.

    With v `chunks` the schedule has v * `stages` stages, v on each position. `replicas` gives the number of
    ranks of each position; ranks are numbered position by position. `minibatches` None is a run without a
    known end, which only asynchronous schedules can have; `update_interval` is theirs too.
    """
    if name not in NAMES:
        close = get_close_matches(name, NAMES, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ScheduleError(f"unknown schedule {name!r}: {hint}schedules are {', '.join(NAMES)}")
    at_least_one("stages", stages)
    if stages > MOST_STAGES:
        raise ScheduleError(f"stages is {stages}: schedules are built for {MOST_STAGES} at most")
    if minibatches is not None:
        at_least_one("minibatches", minibatches)
    counts = checked_replicas(stages, replicas)
    chunks = checked_chunks(name, chunks)
    if name in ASYNCHRONOUS:
        return asynchronous(name, counts, minibatches, update_interval)
    if minibatches is None:
        raise ScheduleError(
            f"schedule {name!r} needs the number of minibatches of an update: it is synchronous"
        )
    if update_interval not in (None, minibatches):
        raise ScheduleError(
            f"update_interval is {update_interval}, but schedule {name!r} updates once, after all "
            f"{minibatches} minibatches: leave it out, or choose one of {', '.join(ASYNCHRONOUS)}"
        )
    if name in ("interleaved", "zb-v"):
        return in_chunks(name, counts, minibatches, chunks)
    placement = positions_of(counts)
    depth = None if name == "gpipe" else depths(counts)
    order = partial(staircase, placement, depth, name == "zb-h1", minibatches)
    return Schedule(name, placement, minibatches, minibatches, synchronous=True, order=order)


def asynchronous(name: str, counts: Sequence[int], minibatches: int | None, interval: int | None) -> Schedule:
    """An update after every `interval` minibatches, without waiting for those in flight."""
    if interval is not None:
        at_least_one("update_interval", interval)
    depth = depths(counts)
    smallest = max(counts)
    if name == "2bw":
        # Two versions are enough if all that was in flight at an update is done at the next one.
        smallest = max(smallest, *(count * ahead for count, ahead in zip(counts, depth, strict=True)))
        if interval is not None and interval < smallest:
            raise ScheduleError(
                f"update_interval {interval} is too short for two versions of the weights: "
                f"with these stages schedule '2bw' needs at least {smallest}"
            )
        interval = interval or max(len(counts), smallest)
    else:
        interval = max(interval or 1, smallest)
    placement = positions_of(counts)
    order = partial(staircase, placement, depth, False, interval)
    return Schedule(name, placement, minibatches, interval, synchronous=False, order=order)


def in_chunks(name: str, counts: Sequence[int], minibatches: int, chunks: int) -> Schedule:
    """Several stages on each rank."""
    if len(set(counts)) > 1:
        raise ScheduleError(
            f"schedule {name!r} needs equally many replicas on all positions, not "
            f"{', '.join(map(str, counts))}: make them equal, or choose another schedule"
        )
    positions, replicas = len(counts), counts[0]
    if name == "zb-v":
        placement = v_placement(positions, replicas)
        order = partial(zero_bubble_v, positions, minibatches, replicas)
    else:
        placement = positions_of(counts) * chunks
        order = partial(interleaved, positions, chunks, replicas)
    lazy = name != "zb-v"
    return Schedule(name, placement, minibatches, minibatches, synchronous=True, order=order, lazy=lazy)


def positions_of(counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    ends = accumulate(counts)
    return tuple(tuple(range(end - count, end)) for end, count in zip(ends, counts, strict=True))


def at_least_one(what: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ScheduleError(f"{what} is {value!r}: it must be a whole number, 1 or more")


def checked_replicas(stages: int, replicas: Sequence[int] | None) -> tuple[int, ...]:
    counts = (1,) * stages if replicas is None else tuple(replicas)
    if len(counts) != stages:
        raise ScheduleError(
            f"replicas {', '.join(map(str, counts))} name {len(counts)} positions, but there are {stages}: "
            "give one number for each"
        )
    for position, count in enumerate(counts):
        at_least_one(f"replicas of stage {position}", count)
    return counts


def checked_chunks(name: str, chunks: int | None) -> int:
    usual = 2 if name in ("interleaved", "zb-v") else 1
    if chunks is None:
        return usual
    at_least_one("chunks", chunks)
    if name != "interleaved" and chunks != usual:
        raise ScheduleError(
            f"chunks is {chunks}, but schedule {name!r} has {usual} on each rank: "
            "leave chunks out, or choose interleaved"
        )
    return chunks
