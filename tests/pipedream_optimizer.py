"""PipeDream's optimizer by the formulas of its paper (SOSP 2019, section 3.1), as a reference for vpipe's planner.

A state is a set of layers with all that they read; a stage is what lies between two states. So every cut of the graph
is offered, not only those of one order. With T(i, j, m) for the stage between the states i and j on m ranks, and
A(j, m) for the slowest stage of the best pipeline up to j on m ranks:

    T(i, j, m) = max(compute of its layers, 2 (m - 1) bytes of its weights / bandwidth) / m
    A(j, m)    = min(T(0, j, m), min over i, n of max(A(i, m - n), 2 bytes that cross i / bandwidth, T(i, j, n)))

Parallel branches make many states, for `inception_v3` 221,565. A limit on the slowest stage leaves few of them: what
crosses must be sent within it, and m ranks compute no more than m times the limit before a state, nor the others
behind it. Under the limit the search is complete; where it finds nothing the limit is raised.

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

State = int
"""A bit for each layer that can be chosen, the highest for the smallest number."""
MOST_STATES = 300_000
STEP = 1.05
"""By how much the limit is raised."""
ROUNDING = 1e-9


class Stage(NamedTuple):
    layers: tuple[Layer, ...]
    replicas: int
    crossing: int
    """Bytes that cross the cut behind it."""


class Neighbours(NamedTuple):
    sources: dict[int, set[int]]
    readers: dict[int, set[int]]


class Growing(NamedTuple):
    """What is known of a state while more are made from it."""

    ready: frozenset[int]
    """Layers that it lacks, with all that they read in it."""
    compute: float
    """Milliseconds."""
    crossing: int


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
        self.chosen = sorted(self.layers.keys() - self.follows.keys())
        self.bits = {number: 1 << place for place, number in enumerate(reversed(self.chosen))}
        self.needs = {number: self._bits(self.sources[number] - free) for number in self.chosen}
        self.read_by = {number: self._bits(self.readers[number] - ends) for number in self.chosen}
        found = self._states()
        # Of equal size the one with the smallest number that the other lacks is first.
        self.states = sorted(found, key=lambda state: (state.bit_count(), -state))
        self.compute = np.array([found[state].compute for state in self.states]) / 1000
        self.crossing = np.array([found[state].crossing for state in self.states])

    def _beside(self, number: int, end: bool) -> int:
        """The layer in whose stage a layer without costs lies."""
        near = self.sources if end else self.readers
        return min(near[number]) if near[number] else number

    def _bits(self, numbers: set[int]) -> State:
        return sum(self.bits[number] for number in numbers)

    def _states(self) -> dict[State, Growing]:
        ready = frozenset(number for number in self.chosen if not self.needs[number])
        found: dict[State, Growing] = {}
        new = {0: Growing(ready, 0.0, 0)}
        while new:
            found |= new
            assert len(found) <= MOST_STATES, "the graph has too many cuts"
            grown: dict[State, Growing] = {}
            for state, known in new.items():
                for number in known.ready:
                    larger = state | self.bits[number]
                    if larger not in grown:
                        grown[larger] = self._with(larger, known, number)
            new = grown
        return found

    def _with(self, state: State, known: Growing, number: int) -> Growing:
        """What is known of a state that has this layer more."""
        layer = self.layers[number]
        ready = {
            reader for reader in self.readers[number] & self.bits.keys() if not self.needs[reader] & ~state
        }
        done = [one for one in self.sources[number] & self.bits.keys() if not self.read_by[one] & ~state]
        sent = sum(layer.outputs) if self.read_by[number] else 0
        return Growing(
            known.ready - {number} | ready,
            known.compute + layer.forward + layer.backward,
            known.crossing + sent - sum(sum(self.layers[one].outputs) for one in done),
        )

    def between(self, start: State, stop: State) -> tuple[Layer, ...]:
        own = {number for number, bit in self.bits.items() if bit & stop & ~start}
        return tuple(
            layer for number, layer in self.layers.items() if self.follows.get(number, number) in own
        )


class Limited:
    """The states that a pipeline can cut at whose slowest stage takes no longer than a limit."""

    def __init__(self, cuts: Cuts, ranks: int, bandwidth: float, limit: float) -> None:
        counts = np.arange(ranks + 1)
        limit *= 1 + ROUNDING
        before = cuts.compute[:, None] <= counts * limit
        behind = (cuts.compute[-1] - cuts.compute)[:, None] <= (ranks - counts) * limit
        send = 2 * cuts.crossing / bandwidth
        fits = before & behind & (send <= limit)[:, None]
        self.places = np.flatnonzero(fits.any(axis=1))
        self.send = send[self.places]
        self.with_ranks = [np.flatnonzero(fits[self.places, count]) for count in counts]
        """For each number of ranks, the states that so many can be up to."""
        size = -(-len(cuts.chosen) // 64) * 8
        text = b"".join(cuts.states[place].to_bytes(size, "big") for place in self.places)
        self.words = np.frombuffer(text, np.uint64).reshape(-1, size // 8)
        inside = np.unpackbits(np.frombuffer(text, np.uint8).reshape(-1, size), axis=1)
        own = [cuts.layers[number] for number in cuts.chosen]
        inside = inside[:, -len(own) :]
        self.compute = inside @ np.array([layer.forward + layer.backward for layer in own]) / 1000
        self.weights = inside @ np.array([layer.parameters for layer in own], dtype=float)

    def inside(self, states: np.ndarray, stop: int) -> np.ndarray:
        """Those of the states that this one contains."""
        states = states[: np.searchsorted(states, stop)]
        return states[~(self.words[states] & ~self.words[stop]).any(axis=1)]


def optimize(graph: Graph, ranks: int, bandwidth: float, most: int | None = None) -> list[Stage]:
    """The stages whose slowest is fastest on all of these ranks, with at most so many replicas of each."""
    cuts = Cuts(graph)
    assert (most or ranks) * len(cuts.chosen) >= ranks, "there are fewer layers than stages"
    limit = cuts.compute[-1] / ranks
    while not (stages := _within(cuts, ranks, bandwidth, most or ranks, limit)):
        limit *= STEP
    return stages


def _within(cuts: Cuts, ranks: int, bandwidth: float, most: int, limit: float) -> list[Stage]:
    """The best stages, if the slowest takes no longer than the limit; otherwise none."""
    kept = Limited(cuts, ranks, bandwidth, limit)
    best = np.full((len(kept.places), ranks + 1), inf)
    best[0, 0] = 0.0
    came: dict[tuple[int, int], tuple[int, int]] = {}
    for total in range(1, ranks + 1):
        for stop in kept.with_ranks[total]:
            for replicas in range(1, min(most, total) + 1):
                before = kept.inside(kept.with_ranks[total - replicas], stop)
                if not len(before):
                    continue
                work = kept.compute[stop] - kept.compute[before]
                size = kept.weights[stop] - kept.weights[before]
                own_time = np.maximum(work, 2 * (replicas - 1) * size / bandwidth) / replicas
                slowest = np.maximum(np.maximum(best[before, total - replicas], kept.send[before]), own_time)
                place = int(slowest.argmin())
                if slowest[place] < best[stop, total]:
                    best[stop, total] = slowest[place]
                    came[stop, total] = int(before[place]), replicas
    if best[-1, ranks] > limit * (1 + ROUNDING):
        return []
    return list(_stages(cuts, kept.places, came, ranks))[::-1]


def _stages(
    cuts: Cuts, places: np.ndarray, came: dict[tuple[int, int], tuple[int, int]], ranks: int
) -> Iterator[Stage]:
    stop = len(places) - 1
    while ranks:
        start, replicas = came[stop, ranks]
        layers = cuts.between(cuts.states[places[start]], cuts.states[places[stop]])
        yield Stage(layers, replicas, int(cuts.crossing[places[stop]]))
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
