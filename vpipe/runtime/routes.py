"""The routes of a minibatch's values between stages, as one rank sees them.

A route depends on the minibatch's place in the program, because replicas take turns. It repeats after as many places
as the least common multiple of the numbers of replicas, so each is computed once.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import lcm
from typing import NamedTuple

import torch

from vpipe.graph import ModelGraph, StageGraph
from vpipe.schedule import Schedule


class Link(NamedTuple):
    """A value that is sent to or received from another rank."""

    value: str
    name: str  # on the wire
    stage: int  # the other one
    rank: int  # the other one
    dtype: torch.dtype


class Route(NamedTuple):
    """The values that a stage exchanges for a minibatch."""

    received: list[Link]
    sent: list[Link]
    returned: list[Link]  # those of `sent` for which a gradient comes back
    passed_in: list[tuple[str, int]]  # value, its producer on this rank
    passed_on: list[tuple[str, int]]  # value, its reader on this rank


class Routes:
    def __init__(
        self, graph: ModelGraph, stage_graphs: Sequence[StageGraph], schedule: Schedule, rank: int
    ) -> None:
        self.stage_graphs = stage_graphs
        self.schedule = schedule
        self.rank = rank
        self._graph = graph
        self._period = lcm(*(len(ranks) for ranks in schedule.placement))
        self._routes: dict[tuple[int, int], Route] = {}
        self._passed: dict[int, list[int]] = {}

    def wire_names(self) -> Iterator[tuple[str, bool]]:
        """Of all ranks, in the same order everywhere, and whether a gradient comes back: not for masks."""
        for producer in self.stage_graphs:
            for value, readers in producer.writes.items():
                for reader in readers:
                    yield _wire_name(value, reader), self.stage_graphs[reader].needs_gradient(value)

    def pairs(self) -> set[tuple[int, int]]:
        """The (sending, receiving) ranks of all values and gradients, of all ranks."""
        rank_of, found = self.schedule.rank_of, set()
        for producer in self.stage_graphs:
            for value, readers in producer.writes.items():
                for reader, place in product(readers, range(self._period)):
                    here, there = rank_of(producer.index, place), rank_of(reader, place)
                    found.add((here, there))
                    if self.stage_graphs[reader].needs_gradient(value):
                        found.add((there, here))
        return {(sender, receiver) for sender, receiver in found if sender != receiver}

    def is_here(self, stage: int, place: int) -> bool:
        """Whether this rank runs the stage for the minibatch."""
        return self.schedule.rank_of(stage, place) == self.rank

    def route(self, stage: int, place: int) -> Route:
        key = (stage, place % self._period)
        if key not in self._routes:
            self._routes[key] = self._find(self.stage_graphs[stage], place)
        return self._routes[key]

    def all_of(self, stages: Iterable[int]) -> Iterator[Route]:
        """The routes of these stages for all minibatches that pass through this rank."""
        for stage, place in product(stages, range(self._period)):
            if self.is_here(stage, place):
                yield self.route(stage, place)

    def stages_passed(self, place: int) -> list[int]:
        """The stages of this rank that the minibatch passes through, the first one first."""
        key = place % self._period
        if key not in self._passed:
            self._passed[key] = [
                graph.index for graph in self.stage_graphs if self.is_here(graph.index, place)
            ]
        return self._passed[key]

    def shape(self, link: Link, fields: Mapping[str, torch.Size]) -> torch.Size:
        """The shape of the link's value, computed from the sizes of the raw batch: no header is sent."""
        return self._graph.shape(link.value, fields)

    def _find(self, graph: StageGraph, place: int) -> Route:
        reads = list(graph.reads.items())
        writes = [(value, reader) for value, readers in graph.writes.items() for reader in readers]
        received = self._links(((value, graph.index, producer) for value, producer in reads), place)
        sent = self._links(((value, reader, reader) for value, reader in writes), place)
        return Route(
            received,
            sent,
            [link for link in sent if self.stage_graphs[link.stage].needs_gradient(link.value)],
            [(value, producer) for value, producer in reads if self.is_here(producer, place)],
            [(value, reader) for value, reader in writes if self.is_here(reader, place)],
        )

    def _links(self, ends: Iterable[tuple[str, int, int]], place: int) -> list[Link]:
        """Links for the (value, its reader, the other stage) whose other stage is on another rank."""
        return [
            Link(
                value,
                _wire_name(value, reader),
                other,
                self.schedule.rank_of(other, place),
                self.stage_graphs[other].value_dtype(value),
            )
            for value, reader, other in ends
            if not self.is_here(other, place)
        ]


def _wire_name(value: str, reader: int) -> str:
    return f"{value} for stage {reader}"
