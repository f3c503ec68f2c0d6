"""PipeDream's optimizer by the formulas of its paper (SOSP 2019, section 3.1), as a reference for vpipe's planner.

A state is a set of layers with all that they read; a stage is what lies between two states. So every cut of the graph
is offered, not only those of one order. With T(i, j, m) for the stage between the states i and j on m ranks, and
A(j, m) for the slowest stage of the best pipeline up to j on m ranks:

    T(i, j, m) = max(compute of its layers, 2 (m - 1) bytes of its weights / bandwidth) / m
    A(j, m)    = min(T(0, j, m), min over i, n of max(A(i, m - n), 2 bytes that cross i / bandwidth, T(i, j, n)))

It shares nothing with the planner. `as_vpipe` hands its stages to the simulator.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

import numpy as np

from tests.pipedream_graphs import Graph, Layer, layers_of_blocks
from vpipe.cost import BlockCost, Plan, Profile

State = frozenset[int]
MOST_STATES = 4000


class Stage(NamedTuple):
    layers: tuple[Layer, ...]
    replicas: int
    crossing: int
    """Bytes that cross the cut behind it."""


class Neighbours(NamedTuple):
    sources: dict[int, set[int]]
    readers: dict[int, set[int]]


def neighbours_of(graph: Graph) -> Neighbours:
    found = Neighbours(defaultdict(set), defaultdict(set))
    for source, reader in graph.edges:
        found.sources[reader].add(source)
        found.readers[source].add(reader)
    return found


def without_loading(layer: Layer) -> Layer:
    """Loading data is no compute: every stage does it beside its own."""
    return layer._replace(forward=0.0, backward=0.0) if layer.kind.startswith("Input") else layer


class Cuts:
    """All states of a graph, the smallest first: the first is empty, the last holds everything that is chosen.

    Raw inputs and what is read of them alone are free: every rank has them. What costs nothing and is read by none is
    in the stage of its source.
    """

    def __init__(self, graph: Graph) -> None:
        self.layers = {layer.number: without_loading(layer) for layer in graph.layers}
        self.sources, self.readers = neighbours_of(graph)
        nothing = {
            number
            for number, layer in self.layers.items()
            if not (layer.forward or layer.backward or layer.parameters)
        }
        free: set[int] = set()
        while more := {number for number in nothing - free if self.sources[number] <= free}:
            free |= more
        ends = {number for number in nothing - free if not self.readers[number]}
        self.follows = {number: self._beside(number, number in ends) for number in free | ends}
        self.chosen = [number for number in self.layers if number not in self.follows]
        self.needs = {number: self.sources[number] - free for number in self.chosen}
        self.states = self._states()
        self.crossing = [self._crossing(state) for state in self.states]

    def _beside(self, number: int, end: bool) -> int:
        """The layer in whose stage a layer without costs lies."""
        near = self.sources if end else self.readers
        return min(near[number]) if near[number] else number

    def _states(self) -> list[State]:
        found: set[State] = {frozenset()}
        new = found
        while new:
            grown = {
                state | {number}
                for state in new
                for number in self.chosen
                if number not in state and self.needs[number] <= state
            }
            new = grown - found
            found = found | new
            assert len(found) <= MOST_STATES, "the graph has too many cuts"
        return sorted(found, key=lambda state: (len(state), sorted(state)))

    def _crossing(self, state: State) -> int:
        read = {number for number in state if self.readers[number] - set(self.follows) - state}
        return sum(sum(self.layers[number].outputs) for number in read)

    def between(self, start: State, stop: State) -> tuple[Layer, ...]:
        own = stop - start
        return tuple(
            layer for number, layer in self.layers.items() if self.follows.get(number, number) in own
        )


def optimize(graph: Graph, ranks: int, bandwidth: float, most: int | None = None) -> list[Stage]:
    """The stages whose slowest is fastest on all of these ranks, with at most so many replicas of each."""
    cuts = Cuts(graph)
    states, count = cuts.states, len(cuts.states)
    row = np.array([[number in state for number in cuts.chosen] for state in states])
    own = [cuts.layers[number] for number in cuts.chosen]
    compute = row @ np.array([layer.forward + layer.backward for layer in own]) / 1000
    weights = row @ np.array([layer.parameters for layer in own], dtype=float)
    inside = row.astype(np.int32)
    send = 2 * np.array(cuts.crossing) / bandwidth
    best = np.full((count, ranks + 1), inf)
    best[0, 0] = 0.0
    came: dict[tuple[int, int], tuple[int, int]] = {}
    for stop in range(1, count):
        # A state can follow those that it contains.
        before = np.flatnonzero((inside[:stop] <= inside[stop]).all(axis=1))
        work, size = compute[stop] - compute[before], weights[stop] - weights[before]
        for replicas in range(1, (most or ranks) + 1):
            own_time = np.maximum(work, 2 * (replicas - 1) * size / bandwidth) / replicas
            for total in range(replicas, ranks + 1):
                slowest = np.maximum(np.maximum(best[before, total - replicas], send[before]), own_time)
                place = int(slowest.argmin())
                if slowest[place] < best[stop, total]:
                    best[stop, total] = slowest[place]
                    came[stop, total] = int(before[place]), replicas
    return list(_stages(cuts, came, ranks))[::-1]


def _stages(cuts: Cuts, came: dict[tuple[int, int], tuple[int, int]], ranks: int) -> Iterator[Stage]:
    stop = len(cuts.states) - 1
    while ranks:
        start, replicas = came[stop, ranks]
        yield Stage(cuts.between(cuts.states[start], cuts.states[stop]), replicas, cuts.crossing[stop])
        stop, ranks = start, ranks - replicas


def as_vpipe(stages: Sequence[Stage], graph: Graph, profile: Profile) -> tuple[Profile, Plan]:
    """The stages as a plan for vpipe's profile of the graph, with blocks cut in two where a stage ends inside them."""
    blocks, partition = [], []
    for stage in stages:
        numbers = {layer.number for layer in stage.layers}
        pieces = [
            [layer for layer in map(without_loading, block) if layer.number in numbers]
            for block in layers_of_blocks(graph, profile)
        ]
        own = [_block(piece) for piece in pieces if piece]
        blocks += [*own[:-1], replace(own[-1], boundary_bytes=stage.crossing)]
        partition.append(len(own))
    replicas = tuple(stage.replicas for stage in stages)
    plan = Plan(tuple(partition), ("keep",) * len(blocks), "pipedream", replicas)
    return replace(profile, blocks=tuple(blocks)), plan


def _block(layers: Sequence[Layer]) -> BlockCost:
    """Inside a stage: what crosses its end is not sent."""
    return BlockCost(
        name="",
        forward=sum(layer.forward for layer in layers) / 1000,
        input_gradient=sum(layer.backward for layer in layers) / 1000,
        weight_gradient=0.0,
        update=0.0,
        kept_bytes=sum(sum(layer.outputs) for layer in layers),
        boundary_bytes=0,
        parameter_bytes=sum(layer.parameters for layer in layers),
    )
