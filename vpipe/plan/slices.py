"""The costs of slices: quick lower bounds for all slices from a block on, exact figures one at a time.

A search looks at every slice of blocks in every place that the schedule offers; only those that its bound leaves in
the race are worth the exact choice of policies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vpipe.cost import Profile
from vpipe.plan.loads import Loads
from vpipe.plan.model import Slice, actions, hop_seconds, host_bandwidth, reduce_seconds
from vpipe.plan.policies import choose, least_memory
from vpipe.plan.reach import Floor, Floors

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]


class Costs(Protocol):
    """What a stage costs, by its first block, the one behind its last, and its load."""

    loads: Loads
    cuts: Floats
    """What crossing a cut costs each of its two stages, by ranks behind it and block behind it."""

    @property
    def floors(self) -> Floors:
        """Quicker and lower bounds, by sums alone."""
        ...

    def bounds(self, start: int, rows: Rows) -> Floats:
        """Lower bounds, by load and stop, for the loads in `rows`; exact where `exact` has been asked."""
        ...

    def exact(self, start: int, stop: int, load: int) -> float: ...


class Sums:
    """Sums over the blocks before each cut, and the memory of all slices by load."""

    def __init__(self, profile: Profile, loads: Loads) -> None:
        blocks = profile.blocks
        self.blocks = len(blocks)
        kept = np.array([block.kept_bytes for block in blocks], dtype=float)
        boundary = np.array([block.boundary_bytes for block in blocks], dtype=float)
        entered = np.concatenate([[0.0], boundary[:-1]])
        again = np.array([block.forward for block in blocks])
        self.kept = _before(kept)
        self.compute = _before(again + np.array([block.backward for block in blocks]))
        self.update = _before([block.update for block in blocks])
        self.version = _before([block.version for block in blocks])
        self.parameters = _before([block.parameter_bytes for block in blocks])
        self.buffers = 2 * np.concatenate([entered, [0.0]])  # of the cut before each block; none at the ends
        in_flight = _column(load.in_flight for load in loads.loads)
        self.in_flight = in_flight
        self.swap_rate = in_flight - _column(load.swapped_in for load in loads.loads)
        self.deferred = _before([block.deferred for block in blocks])
        self.waiting = _column(load.waiting for load in loads.loads)
        saved = np.maximum(0.0, in_flight * (kept - entered))
        with np.errstate(divide="ignore"):
            self.efficiency = np.where(saved > 0, saved / np.where(saved > 0, again, 1.0), 0.0)
        self.savable = _before(np.maximum(saved, self.swap_rate * kept))
        self.split = _column(load.split for load in loads.loads)
        swapped = (in_flight - self.swap_rate - 1) * kept
        self.others = _before(np.minimum((in_flight - 1) * np.minimum(kept, entered), swapped))
        copies = _column(load.versions for load in loads.loads) + 1 + profile.optimizer_ratio
        self.copies = copies
        self.profile = profile
        own = np.array([block.parameter_bytes for block in blocks], dtype=float)
        for tie in profile.tied:
            own[list(tie.blocks)] -= tie.bytes
        self.own_parameters = _before(np.maximum(0.0, own))

    def shared(self, start: int) -> Floats:
        """Parameter bytes that slices from `start` count more than once, by stop."""
        found = np.zeros(self.blocks - start)
        for tie in self.profile.tied:
            for block in [block for block in tie.blocks if block >= start][1:]:
                found[block - start :] += tie.bytes
        return found

    def keeping(self, start: int, rows: Rows) -> Floats:
        """The bytes of slices from `start` that keep everything, by load and stop (from start + 1 on); what a
        running backward adds, and what is shared with other slices, is left out."""
        ends = slice(start + 1, None)
        weights = self.copies[rows] * (self.parameters[ends] - self.parameters[start] - self.shared(start))
        kept = self.in_flight[rows] * (self.kept[ends] - self.kept[start])
        deferred = self.waiting[rows] * (self.deferred[ends] - self.deferred[start])
        return np.asarray(weights + kept + deferred + (self.buffers[start] + self.buffers[ends]))

    def least(self, start: int, rows: Rows, keeping: Floats) -> Floats:
        """Fewer bytes than any policies could do with, by those of `keeping`.

        When the first part of a split backward ends, the minibatch waits whole, beside what the others hold.
        """
        savable, others = self.savable[rows, start:], self.others[rows, start:]
        least = keeping - (savable[:, 1:] - savable[:, :1])
        if not self.split.any():
            return np.asarray(least - 1)
        ends = slice(start + 1, None)
        kept, deferred = self.kept[ends] - self.kept[start], self.deferred[ends] - self.deferred[start]
        waiting = keeping - self.in_flight[rows] * kept + deferred + (others[:, 1:] - others[:, :1])
        return np.where(self.split[rows] > 0, np.maximum(least, waiting), least) - 1

    def floors(self) -> list[Floor]:
        """Of the bytes: `least` without messages and shared parameters."""
        bare = self.copies * self.own_parameters + self.waiting * self.deferred
        byte = np.full_like(self.in_flight, -1.0)
        found = [Floor(bare + self.in_flight * self.kept - self.savable, byte)]
        if self.split.any():
            found.append(Floor(np.where(self.split > 0, bare + self.deferred + self.others, 0.0), byte))
        return found


class SliceCosts(ABC):
    """What is common to the two kinds of cost: exact figures are asked once and then remembered."""

    def __init__(self, profile: Profile, loads: Loads) -> None:
        self.profile = profile
        self.loads = loads
        self.sums = Sums(profile, loads)
        self.known: dict[int, dict[tuple[int, int], float]] = {}
        self.cuts = np.zeros((loads.ranks + 1, len(profile.blocks) + 1))

    def bounds(self, start: int, rows: Rows) -> Floats:
        found = np.full((len(self.loads.loads), self.sums.blocks + 1), np.inf)
        found[rows, start + 1 :] = self.quick(start, rows)
        for (load, stop), value in self.known.get(start, {}).items():
            found[load, stop] = value
        return found

    def exact(self, start: int, stop: int, load: int) -> float:
        known = self.known.setdefault(start, {})
        if (load, stop) not in known:
            known[load, stop] = self.solve(start, stop, load)
        return known[load, stop]

    def slice(self, start: int, stop: int, load: int) -> Slice:
        """A stand-in whose ranks are not known yet: only whether there are neighbours matters here."""
        before, after = None if start == 0 else 0, None if stop == self.sums.blocks else 0
        return Slice(start, stop, self.loads.loads[load], (0,), before, after)

    @property
    @abstractmethod
    def floors(self) -> Floors: ...

    @abstractmethod
    def quick(self, start: int, rows: Rows) -> Floats:
        """The bounds, by load and stop from `start` + 1 on."""

    @abstractmethod
    def solve(self, start: int, stop: int, load: int) -> float: ...


class TimeCosts(SliceCosts):
    """Seconds a minibatch, replicas taking turns; endless where the slice does not fit."""

    def __init__(self, profile: Profile, loads: Loads, memory: int) -> None:
        super().__init__(profile, loads)
        self.memory = memory
        self.policies: dict[tuple[int, int, int], list[str]] = {}
        self.replicas = _column(load.replicas for load in loads.loads)
        self.per_update = _column(load.per_update for load in loads.loads)
        self.reduce_fixed = _column(reduce_seconds(profile, load.replicas, 0) for load in loads.loads)
        many = 2.0**40  # of one byte alone the latency would leave nothing
        reduced = _column(reduce_seconds(profile, load.replicas, many) for load in loads.loads)
        self.reduce_byte = (reduced - self.reduce_fixed) / many
        self.versioned = _column(load.versions > 1 for load in loads.loads)
        self.runtime = _column(actions(load) * profile.device.overhead for load in loads.loads)
        self.host = host_bandwidth(profile)
        self.copies = np.zeros(len(profile.blocks) + 1)
        if profile.link.sender_busy:
            self.copies[1:-1] = [profile.link.seconds(block.boundary_bytes) for block in profile.blocks[:-1]]
        for behind in range(1, loads.ranks):
            rank = loads.ranks - behind
            if behind > 1 and not profile.links:
                self.cuts[behind] = self.cuts[1]
                continue
            for block in range(1, len(profile.blocks)):
                boundary = profile.blocks[block - 1].boundary_bytes
                self.cuts[behind, block] = hop_seconds(profile, rank - 1, rank, boundary)

    @cached_property
    def floors(self) -> Floors:
        sums = self.sums
        spent = sums.update + self.reduce_byte * sums.own_parameters + self.versioned * sums.version
        before = (sums.compute + spent / self.per_update) / self.replicas
        fixed = (self.reduce_fixed / self.per_update + self.runtime) / self.replicas
        always = [floor._replace(most=float(self.memory)) for floor in sums.floors()]
        return Floors([Floor(before, fixed)], always)

    def quick(self, start: int, rows: Rows) -> Floats:
        sums, ends = self.sums, slice(start + 1, None)
        keeping = sums.keeping(start, rows)
        need = keeping - self.memory
        kept = sums.kept[ends] - sums.kept[start]
        parameters = sums.parameters[ends] - sums.parameters[start] - sums.shared(start)
        spent = sums.update[ends] - sums.update[start] + self.reduce_byte[rows] * parameters
        spent = spent + self.versioned[rows] * (sums.version[ends] - sums.version[start])
        compute = sums.compute[ends] - sums.compute[start] + self.copies[start] + self.copies[ends]
        compute = compute + (spent + self.reduce_fixed[rows]) / self.per_update[rows] + self.runtime[rows]
        # Swapping is free while compute lasts; from there on each second carries and recomputes so many bytes.
        rate = sums.swap_rate[rows]
        need_more = need - rate * np.minimum(compute * self.host, kept)
        best = np.maximum.accumulate(sums.efficiency[rows, start:], axis=1) + rate * self.host
        with np.errstate(divide="ignore", invalid="ignore"):
            longer = np.where(need_more > 0, need_more / best, 0.0)
        fits = sums.least(start, rows, keeping) <= self.memory
        return np.where(fits, (compute + longer) / self.replicas[rows], np.inf)

    def solve(self, start: int, stop: int, load: int) -> float:
        chosen = choose(self.profile, [self.slice(start, stop, load)], self.memory)
        if chosen is None:
            return np.inf
        seconds, policies = chosen
        self.policies[start, stop, load] = policies[0]
        return seconds / self.loads.loads[load].replicas


class MemoryCosts(SliceCosts):
    """The least bytes in which a slice runs at all."""

    @cached_property
    def floors(self) -> Floors:
        return Floors(self.sums.floors())

    def quick(self, start: int, rows: Rows) -> Floats:
        return np.maximum(0.0, self.sums.least(start, rows, self.sums.keeping(start, rows)))

    def solve(self, start: int, stop: int, load: int) -> float:
        return float(least_memory(self.profile, [self.slice(start, stop, load)]))


def _before(values: Iterable[float] | Floats) -> Floats:
    """Sums of what stands before each position, along the last axis."""
    array = np.asarray(values if isinstance(values, np.ndarray) else list(values), dtype=float)
    return np.concatenate([np.zeros((*array.shape[:-1], 1)), np.cumsum(array, axis=-1)], axis=-1)


def _column(values: Iterable[float]) -> Floats:
    return np.array(list(values), dtype=float)[:, None]
