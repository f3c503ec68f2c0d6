"""The kind of a schedule: how it is built for any pipeline, and what has to be known of it before it is built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple, Protocol

from vpipe.errors import ScheduleError
from vpipe.schedule.facts import splits_backward
from vpipe.schedule.program import Order, Placement, Schedule, renumbered

MOST_STAGES = MOST_RANKS = 4096
MOST_INTERVAL = 10_000
MOST_DEPTH = 4096
"""Minibatches of an asynchronous update, and those in flight at a rank. Beyond these numbers a schedule is a typing
error."""


class PipelineShape(NamedTuple):
    """What a schedule is built for."""

    name: str
    synchronous: bool
    replicas: tuple[int, ...]
    """Ranks of each pipeline position."""
    chunks: int
    """Stages on each rank."""
    minibatches: int | None
    """None: as many as the data has (asynchronous schedules only)."""
    update_interval: int
    depth: tuple[int, ...] | None = None
    """Forwards of each stage before its first pair of F and B; None: as many as keep the ranks behind it busy."""

    @property
    def placement(self) -> Placement:
        """One stage on each position, ranks numbered position by position."""
        ends = accumulate(self.replicas)
        return tuple(tuple(range(end - count, end)) for end, count in zip(ends, self.replicas, strict=True))

    def schedule(self, order: Order, placement: Placement | None = None, lazy: bool = True) -> Schedule:
        return Schedule(
            self.name,
            placement or self.placement,
            self.minibatches,
            self.update_interval,
            self.synchronous,
            order,
            lazy,
            depth=self.depth,
        )


class PlaceHolding(NamedTuple):
    """The most that a rank of one stage holds."""

    in_flight: int
    versions: int = 1
    lag: int = 0
    """The most that `Schedule.lag` can be."""


class HoldingRule(Protocol):
    """What a rank holds, by its place alone, whatever stages and replicas there are before and behind it."""

    def __call__(
        self, ranks: int, behind: int, replicas: int, minibatches: int, interval: int
    ) -> PlaceHolding:
        """`behind`: ranks from this stage to the end; `minibatches`: the rank's own of a synchronous update."""
        ...


def at_once(replicas: Sequence[int], depth: Sequence[int] | None, wanted: int | None) -> int:
    """An update after every minibatch, or after one of each replica."""
    return max(wanted or 1, *replicas)


@dataclass(frozen=True)
class ScheduleKind:
    """A schedule by name. What is not stated here is read from the programs that `make` gives."""

    name: str
    synchronous: bool
    make: Callable[[PipelineShape], Schedule]
    chunks: int = 1
    """Stages on each rank."""
    any_chunks: bool = False
    """Whether users may choose another number of them."""
    replicas: Literal["any", "equal", "one"] = "one"
    """How many ranks a position may have: any number, as many as all others, or one."""
    any_depth: bool = False
    """Whether users may choose how many forwards each stage runs ahead."""
    interval: Callable[[Sequence[int], Sequence[int] | None, int | None], int] = at_once
    """Of an asynchronous schedule: the update interval for these replicas, this depth and the one that users want."""
    holding: HoldingRule | None = None
    """None: known only of a whole schedule, from its programs."""
    table: Schedule | None = None
    """The one schedule of this kind, where users wrote it down themselves."""

    @cached_property
    def splits_backward(self) -> bool:
        return splits_backward(self.table or self.build(1, 1 if self.synchronous else None))

    def default_minibatches(self, positions: int) -> int | None:
        """Minibatches of a synchronous update where users give none; None: as many as the data has."""
        return 2 * positions if self.synchronous else None

    def build(
        self,
        positions: int,
        minibatches: int | None,
        *,
        chunks: int | None = None,
        replicas: Sequence[int] | None = None,
        update_interval: int | None = None,
        depth: Sequence[int] | None = None,
        placement: Sequence[Sequence[int]] | None = None,
    ) -> Schedule:
        """The schedule over so many pipeline positions.

        With v `chunks` it has v stages on each position. `replicas` gives the number of ranks of each position;
        ranks are numbered position by position, unless `placement` gives those of each position. `minibatches` None is
        a run without a known end, which only asynchronous schedules can have; `update_interval` is theirs too. `depth`
        gives the forwards that a rank of each position runs before its first pair of forward and backward.
        """
        if self.table is not None:
            return self.table
        at_least_one("stages", positions)
        chunks = self.checked_chunks(chunks)
        at_most("stages", positions, MOST_STAGES)
        at_most("stages, with chunks of each,", positions * chunks, MOST_STAGES)
        if minibatches is not None:
            at_least_one("minibatches", minibatches)
        counts = self._checked_replicas(positions, replicas)
        ahead = self._checked_depth(counts, depth)
        interval = self._checked_interval(counts, ahead, minibatches, update_interval)
        made = self.make(
            PipelineShape(self.name, self.synchronous, counts, chunks, minibatches, interval, ahead)
        )
        return made if placement is None else renumbered(made, checked_placement(counts, placement))

    def checked_chunks(self, chunks: int | None) -> int:
        if chunks is None:
            return self.chunks
        at_least_one("chunks", chunks)
        if not self.any_chunks and chunks != self.chunks:
            raise ScheduleError(
                f"chunks is {chunks}, but schedule {self.name!r} has {self.chunks} on each rank: "
                "leave chunks out, or choose interleaved"
            )
        return chunks

    def _checked_replicas(self, positions: int, replicas: Sequence[int] | None) -> tuple[int, ...]:
        counts = (1,) * positions if replicas is None else tuple(replicas)
        shown = short_list(counts)
        if len(counts) != positions:
            raise ScheduleError(
                f"replicas {shown} name {len(counts)} positions, but there are {positions}: give one number for each"
            )
        for position, count in enumerate(counts):
            at_least_one(f"replicas of stage {position}", count)
        at_most("ranks", sum(counts), MOST_RANKS)
        if self.replicas == "one" and max(counts) > 1:
            raise ScheduleError(
                f"schedule {self.name!r} has one rank on each position, not {shown}: "
                "leave replicas out, or choose another schedule"
            )
        if self.replicas == "equal" and len(set(counts)) > 1:
            raise ScheduleError(
                f"schedule {self.name!r} needs equally many replicas on all positions, not {shown}: "
                "make them equal, or choose another schedule"
            )
        return counts

    def _checked_depth(self, counts: tuple[int, ...], depth: Sequence[int] | None) -> tuple[int, ...] | None:
        if depth is None:
            return None
        shown = short_list(depth)
        if not self.any_depth:
            raise ScheduleError(
                f"depth is {shown}, but schedule {self.name!r} has a warm-up of its own: leave depth out, or choose "
                "1f1b, zb-h1, pipedream, vpipe or 2bw"
            )
        if len(depth) != len(counts):
            raise ScheduleError(
                f"depth {shown} names {len(depth)} stages, but there are {len(counts)}: give one number for each"
            )
        for stage, ahead in enumerate(depth):
            if isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 0:
                raise ScheduleError(
                    f"depth of stage {stage} is {ahead!r}: it must be a whole number, 0 or more"
                )
            at_most(f"depth of stage {stage}", ahead, MOST_DEPTH)
        if (found := too_shallow(counts, depth, joint=not self.synchronous)) is not None:
            stage, later, least = found
            why = "its first backward would wait for ever for more forwards"
            if not self.synchronous and counts[stage] > 1:
                why = (
                    f"its backwards would wait for ever for forwards that the {counts[stage]} replicas of stage "
                    f"{stage} only run after their joint update"
                )
            raise ScheduleError(
                f"depth of stage {stage} is {depth[stage]}, but stage {later} has {depth[later]}, and {why}: give "
                f"stage {stage} at least {least}"
            )
        return tuple(depth)

    def _checked_interval(
        self,
        counts: tuple[int, ...],
        depth: tuple[int, ...] | None,
        minibatches: int | None,
        wanted: int | None,
    ) -> int:
        if not self.synchronous:
            if wanted is not None:
                at_least_one("update_interval", wanted)
                at_most("update_interval", wanted, MOST_INTERVAL)
            return self.interval(counts, depth, wanted)
        if minibatches is None:
            raise ScheduleError(
                f"schedule {self.name!r} needs the number of minibatches of an update: it is synchronous"
            )
        if wanted not in (None, minibatches):
            raise ScheduleError(
                f"update_interval is {wanted}, but schedule {self.name!r} updates once, after all "
                f"{minibatches} minibatches: leave it out, or choose an asynchronous schedule"
            )
        return minibatches


def checked_placement(counts: Sequence[int], placement: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
    """`counts`: ranks of each position."""
    shown = "; ".join(short_list(own) for own in placement[:20])
    if [len(own) for own in placement] != list(counts):
        raise ScheduleError(
            f"placement {shown} has {short_list([len(own) for own in placement])} ranks on its positions, but replicas "
            f"are {short_list(counts)}: make the two equal"
        )
    if sorted(rank for own in placement for rank in own) != list(range(sum(counts))):
        raise ScheduleError(f"placement {shown}: name every rank from 0 to {sum(counts) - 1} once")
    return placement


def too_shallow(
    replicas: Sequence[int], depth: Sequence[int], *, joint: bool = False
) -> tuple[int, int, int] | None:
    """A stage that lets in fewer minibatches than a later one needs for its backwards, that one, and the least depth
    that would do; None: there is no such stage.

    A stage of R ranks lets (d + 1) R minibatches in; one of R' ranks needs those up to number d' R'. `joint`: the ranks
    of a stage update together while minibatches are in flight. Before the update that ends with minibatch e they let in
    those up to e + d R only, and the other stage needs those up to e + d' R' for the backward of e.
    """
    needs = [ahead * count for ahead, count in zip(depth, replicas, strict=True)]
    most = len(needs) - 1  # of the stages from here on, the one that needs most
    for stage in reversed(range(len(needs))):
        more = 0 if joint else replicas[stage] - 1
        if needs[most] > needs[stage] + more:
            return stage, most, -(-(needs[most] - more) // replicas[stage])
        most = max(most, stage, key=needs.__getitem__)
    return None


def table_kind(schedule: Schedule) -> ScheduleKind:
    """The kind that has this one schedule."""
    return ScheduleKind(schedule.name, schedule.synchronous, lambda shape: schedule, table=schedule)


def short_list(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts[:20])) + (", ..." if len(counts) > 20 else "")


def at_most(what: str, value: int, most: int) -> None:
    if value > most:
        raise ScheduleError(f"{what} is {value}: schedules are built for {most:,} at most")


def at_least_one(what: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ScheduleError(f"{what} is {value!r}: it must be a whole number, 1 or more")
