"""The schedule: where each stage sits, and what each rank does in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import lcm

from vpipe.errors import ScheduleError
from vpipe.schedule.action import UPDATE, Action, Op

Exists = Callable[[int], bool]
Edges = frozenset[tuple[int, int]]
Placement = tuple[tuple[int, ...], ...]
Order = Callable[[int, Exists], Iterator[Action]]
"""Gives the actions of one rank, asking `exists` whether a minibatch is there before it is used."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """Pure data, but for `order`: the programs of an endless run cannot be listed, so they are generated."""

    name: str
    placement: Placement
    """The ranks that hold each stage: several are replicas; one rank may hold several stages."""
    minibatches: int | None
    """None: as many as the data has (asynchronous schedules only)."""
    update_interval: int
    """Minibatches of one update; for synchronous schedules, all."""
    synchronous: bool
    order: Order
    lazy: bool = True
    """Whether `order` asks `exists`; a listed order is what it is."""
    lowered: bool = False
    """Whether sends, receives and reductions stand in the programs."""
    edges: Edges | None = None
    """(producer, reader) pairs of stages; None is the chain 0, 1, 2, ..."""
    reduced: frozenset[int] = frozenset()
    """Stages with a REDUCE before their STEP."""
    depth: tuple[int, ...] | None = None
    """Of each stage, the forwards that a rank runs before its first pair of F and B; None: what the schedule has by
    itself."""

    def _repr_html_(self) -> str:
        """Its picture, for notebooks; of an endless schedule the beginning."""
        from vpipe.schedule.facts import sample
        from vpipe.schedule.picture import draw_svg, image

        return image(draw_svg(sample(self)), f"schedule {self.name}")

    @property
    def num_stages(self) -> int:
        """Stages of the model."""
        return len(self.placement)

    @cached_property
    def num_ranks(self) -> int:
        return 1 + max(rank for ranks in self.placement for rank in ranks)

    @cached_property
    def _stages_of(self) -> tuple[tuple[int, ...], ...]:
        held: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for stage, ranks in enumerate(self.placement):
            for rank in ranks:
                held[rank].append(stage)
        return tuple(map(tuple, held))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds."""
        return self._stages_of[rank]

    def rank_of(self, stage: int, minibatch: int) -> int:
        """The rank that runs a minibatch on a stage: replicas take turns."""
        ranks = self.placement[stage]
        return ranks[minibatch % len(ranks)]

    def program(self, rank: int, exists: Exists | None = None) -> Iterator[Action]:
        """The actions of `rank` in order; `exists` says where the data ends (default: at `minibatches`)."""
        if not 0 <= rank < self.num_ranks:
            raise ScheduleError(
                f"rank {rank} is not in schedule {self.name!r}: it has ranks 0 to {self.num_ranks - 1}"
            )
        return self.order(rank, exists or self.exists)

    @cached_property
    def filling(self) -> int:
        """Minibatches that fill the pipeline."""
        return filling([len(ranks) for ranks in self.placement], self.depth, self.num_ranks)

    @cached_property
    def representative(self) -> int:
        """As many minibatches of a lazy schedule as show its start, its steady state and its end."""
        interval = 0 if self.synchronous else self.update_interval
        enough = self.filling + (self.num_stages if self.depth is None else self.filling) + 2 * interval
        if self.minibatches is None:
            return enough
        return min(self.minibatches, enough) if self.lazy else self.minibatches

    @cached_property
    def lag(self) -> int:
        """After how many updates all that any stage did for an update is known to every rank; 0 if synchronous.

        Who makes update u has run all its minibatches backward. Their forwards stand, in the program of each rank
        that they came from, behind the STEP of update u - lag.
        """
        if self.synchronous:
            return 0
        return max(self._lag_of(stage, rank) for stage, ranks in enumerate(self.placement) for rank in ranks)

    def _lag_of(self, stage: int, rank: int) -> int:
        total, interval = self.representative, self.update_interval
        made = lag = reached = 0
        before: dict[int, int] = {}  # update: those that stand before the last forward for it
        # A generated program repeats itself once it updates: all is seen when all replicas have had their turns.
        enough = 1 + lcm(interval, *map(len, self.placement)) // interval if self.lazy else total
        for own, op, minibatch in self.program(rank, range(total).__contains__):
            if own == stage and op is Op.F:
                before[minibatch // interval] = made
            elif own == stage and op is Op.STEP:
                made += 1
                if made > enough:
                    break
        # Forwards for the last update are seen in part only, if the program goes on.
        ends = total // interval if self.lazy else -(-total // interval)
        for update in range(min(ends, max(before, default=0)) if made > enough else ends):
            reached = max(reached, before.get(update, 0))
            lag = max(lag, update + 1 - reached)
        return lag

    @property
    def buffer(self) -> int:
        """Messages of one tensor that a channel has room for, so that a full pipeline never waits for it."""
        return max(2 * self.num_stages, self.filling)

    @property
    def exists(self) -> Exists:
        """Whether there is a minibatch of a number."""
        return always if self.minibatches is None else range(self.minibatches).__contains__


def filling(replicas: Sequence[int], depth: Sequence[int] | None, ranks: int) -> int:
    """Minibatches that fill a pipeline: one for each rank or, where its depth is chosen, as many as that lets in."""
    return max(ranks, *((ahead + 1) * count for ahead, count in zip(depth or (), replicas, strict=False)), 1)


def in_order(placement: Sequence[Sequence[int]]) -> bool:
    """Whether ranks are numbered position by position."""
    ranks = [rank for own in placement for rank in own]
    return ranks == list(range(len(ranks)))


def renumbered(schedule: Schedule, placement: Sequence[Sequence[int]]) -> Schedule:
    """The same programs on other ranks: those of each position, where ranks are numbered position by position."""
    if in_order(placement):
        return schedule
    ranks = [rank for own in placement for rank in own]
    places = {rank: place for place, rank in enumerate(ranks)}
    moved = tuple(tuple(ranks[place] for place in own) for own in schedule.placement)
    return replace(schedule, placement=moved, order=partial(_renumbered, schedule.order, places))


def _renumbered(order: Order, places: Mapping[int, int], rank: int, exists: Exists) -> Iterator[Action]:
    return order(places[rank], exists)


def shape(schedule: Schedule) -> str:
    """Stages and ranks in words: "4 stages", "4 ranks x 2 stages", "2 stages on 3 ranks"."""
    stages, ranks = schedule.num_stages, schedule.num_ranks
    if stages > ranks and {len(schedule.stages_of(rank)) for rank in range(ranks)} == {stages // ranks}:
        return f"{ranks} ranks x {stages // ranks} stages"
    counted = f"{stages} stage{'s' * (stages != 1)}"
    return counted if stages == ranks else f"{counted} on {ranks} rank{'s' * (ranks != 1)}"


def shortened(schedule: Schedule, minibatches: int) -> Schedule:
    """The same programs without the minibatches that do not exist: what could run with them can without them."""
    order = partial(_shortened, schedule.order, minibatches, schedule.update_interval)
    interval = (
        min(schedule.update_interval, minibatches) if schedule.synchronous else schedule.update_interval
    )
    return replace(schedule, minibatches=minibatches, update_interval=interval, order=order)


def _shortened(order: Order, minibatches: int, interval: int, rank: int, exists: Exists) -> Iterator[Action]:
    for action in order(rank, exists):
        if action.minibatch < minibatches:
            yield action
        elif action.op in UPDATE and action.minibatch // interval * interval < minibatches:
            yield action._replace(minibatch=minibatches - 1)  # an update of fewer


def always(minibatch: int) -> bool:
    return True


def listed(programs: Iterable[Iterable[Action]]) -> Order:
    """The order of programs that stand as lists."""
    return partial(_listed, tuple(map(tuple, programs)))


def _listed(programs: tuple[tuple[Action, ...], ...], rank: int, exists: Exists) -> Iterator[Action]:
    return iter(programs[rank])
