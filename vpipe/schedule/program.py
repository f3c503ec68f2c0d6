"""The schedule: where each stage sits, and what each rank does in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol

from vpipe.errors import ScheduleError
from vpipe.schedule.action import Action

Exists = Callable[[int], bool]
Edges = frozenset[tuple[int, int]]


class Order(Protocol):
    """Gives the actions of one rank, asking `exists` whether a minibatch is there before it is used."""

    def __call__(self, rank: int, exists: Exists) -> Iterator[Action]: ...


@dataclass(frozen=True, eq=False)
class Schedule:
    """Pure data, but for `order`: the programs of an endless run cannot be listed, so they are generated."""

    name: str
    placement: tuple[tuple[int, ...], ...]
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

    @property
    def num_stages(self) -> int:
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
        return self._stages_of[rank]

    def rank_of(self, stage: int, minibatch: int) -> int:
        ranks = self.placement[stage]
        return ranks[minibatch % len(ranks)]

    def program(self, rank: int, exists: Exists | None = None) -> Iterator[Action]:
        """The actions of `rank` in order; `exists` says where the data ends (default: at `minibatches`)."""
        if not 0 <= rank < self.num_ranks:
            raise ScheduleError(
                f"rank {rank} is not in schedule {self.name!r}: it has ranks 0 to {self.num_ranks - 1}"
            )
        return self.order(rank, exists or self.exists)

    @property
    def lag(self) -> int:
        """After how many updates everything that stage 0 did for an update is known to all.

        Stage 0 starts a minibatch only when the one that many places before it has come back.
        """
        if self.synchronous:
            return 0
        ranks = [len(ranks) for ranks in self.placement]
        under_way = -(-sum(ranks) // ranks[0]) * ranks[0]
        return -(-under_way // self.update_interval)

    @property
    def exists(self) -> Exists:
        return always if self.minibatches is None else range(self.minibatches).__contains__


def always(minibatch: int) -> bool:
    return True


def listed(programs: Iterable[Iterable[Action]]) -> Order:
    """The order of programs that stand as lists."""
    return partial(_listed, tuple(map(tuple, programs)))


def _listed(programs: tuple[tuple[Action, ...], ...], rank: int, exists: Exists) -> Iterator[Action]:
    return iter(programs[rank])
