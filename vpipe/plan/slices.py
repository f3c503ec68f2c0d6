"""The costs of slices: quick lower bounds for all slices from a block on, exact figures one at a time.

A search looks at every slice of blocks in every place that the schedule offers; only those that its bound leaves in
the race are worth the exact choice of policies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from vpipe.cost import BlockCost, Profile
from vpipe.plan.choice import choose, least_memory
from vpipe.plan.loads import Loads
from vpipe.plan.model import Slice, actions, hop_seconds, host_bandwidth, reduce_seconds
from vpipe.plan.stage_bounds import Floor, Floors
from vpipe.plan.sums import Floats, Span, Sums, column

Kinds = npt.NDArray[np.int32]


class SliceCosts(ABC):
    """What a stage costs, by its first block, the one behind its last, and its load.

    Exact figures are found once for slices of equal blocks.
    """

    def __init__(self, profile: Profile, loads: Loads) -> None:
        self.profile = profile
        self.loads = loads
        self.sums = Sums(profile, loads)
        self.known: dict[int, dict[tuple[int, int], float]] = {}
        self.solved: dict[tuple[object, ...], tuple[float, list[str]]] = {}
        self.kinds = block_kinds(profile.blocks)
        self.cuts = np.zeros((loads.ranks + 1, len(profile.blocks) + 1))
        """What crossing a cut costs each of its two stages, by ranks behind it and block behind it."""

    def bounds(self, span: Span) -> Floats:
        """Lower bounds, by load and stop (from start + 1 on); exact where `exact` has been asked."""
        found = np.full((len(self.loads.loads), span.last - span.start), np.inf)
        found[span.rows] = self.quick(span)
        for (load, stop), value in self.known.get(span.start, {}).items():
            if stop <= span.last:
                found[load, stop - span.start - 1] = value
        return found

    def exact(self, start: int, stop: int, load: int) -> float:
        known = self.known.setdefault(start, {})
        if (load, stop) not in known:
            known[load, stop] = self.best(start, stop, load)[0]
        return known[load, stop]

    def best(self, start: int, stop: int, load: int) -> tuple[float, list[str]]:
        """The cost, and the policies that it stands for, if it does for any."""
        key = (load, self.kinds[start:stop].tobytes(), *self.surroundings(start, stop))
        if key not in self.solved:
            self.solved[key] = self.solve(start, stop, load)
        return self.solved[key]

    def surroundings(self, start: int, stop: int) -> tuple[object, ...]:
        """What else the cost of a slice depends on: what it reads, whether it is the last, what it shares."""
        before = self.profile.blocks[start - 1].boundary_bytes if start else None
        shares = any(tie.inside(start, stop) for tie in self.profile.tied)
        return before, stop == self.sums.blocks, start if shares else None

    def slice(self, start: int, stop: int, load: int) -> Slice:
        """A stand-in whose ranks are not known yet: only whether there are neighbours matters here."""
        before, after = None if start == 0 else 0, None if stop == self.sums.blocks else 0
        return Slice(start, stop, self.loads.loads[load], (0,), before, after)

    @property
    @abstractmethod
    def floors(self) -> Floors:
        """Quicker and lower bounds, by sums alone."""

    @abstractmethod
    def quick(self, span: Span) -> Floats:
        """The bounds of the rows."""

    @abstractmethod
    def solve(self, start: int, stop: int, load: int) -> tuple[float, list[str]]: ...


@lru_cache(maxsize=4)
def block_kinds(blocks: tuple[BlockCost, ...]) -> Kinds:
    """A number of each block; equal blocks have the same one."""
    numbers: dict[BlockCost, int] = {}
    kinds = [numbers.setdefault(replace(block, name=""), len(numbers)) for block in blocks]
    return np.array(kinds, dtype=np.int32)


class TimeCosts(SliceCosts):
    """Seconds a minibatch, replicas taking turns; endless where the slice does not fit."""

    def __init__(self, profile: Profile, loads: Loads, memory: int) -> None:
        super().__init__(profile, loads)
        self.memory = memory
        self.replicas = column(load.replicas for load in loads.loads)
        self.per_update = column(load.per_update for load in loads.loads)
        self.reduce_fixed = column(reduce_seconds(profile, load.replicas, 0) for load in loads.loads)
        many = 2.0**40  # of one byte alone the latency would leave nothing
        reduced = column(reduce_seconds(profile, load.replicas, many) for load in loads.loads)
        self.reduce_byte = (reduced - self.reduce_fixed) / many
        self.versioned = column(load.versions > 1 for load in loads.loads)
        self.runtime = column(actions(load) * profile.device.overhead for load in loads.loads)
        self.host = host_bandwidth(profile)
        self.copies = np.zeros(len(profile.blocks) + 1)
        if profile.link.sender_busy:
            self.copies[1:-1] = [profile.link.seconds(block.boundary_bytes) for block in profile.blocks[:-1]]
        for behind in range(1, loads.ranks):
            rank = loads.ranks - behind
            if behind > 1 and not profile.links and profile.hosts is None:
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

    def quick(self, span: Span) -> Floats:
        sums, start, ends, rows = self.sums, span.start, span.ends, span.rows
        keeping = sums.keeping(span)
        need = keeping + sums.working[start : span.last] - self.memory
        copyable = sums.copyable[ends] - sums.copyable[start]
        parameters = sums.parameters[ends] - sums.parameters[start] - sums.shared(span)
        spent = sums.update[ends] - sums.update[start] + self.reduce_byte[rows] * parameters
        spent = spent + self.versioned[rows] * (sums.version[ends] - sums.version[start])
        compute = sums.compute[ends] - sums.compute[start] + self.copies[start] + self.copies[ends]
        compute = compute + (spent + self.reduce_fixed[rows]) / self.per_update[rows] + self.runtime[rows]
        longer = self.saving_seconds(span, need, np.minimum(compute * self.host, copyable))
        fits = sums.least(span, keeping) <= self.memory
        return np.where(fits, (compute + longer) / self.replicas[rows], np.inf)

    def saving_seconds(self, span: Span, need: Floats, carried: Floats) -> Floats:
        """What saving so many bytes takes at least, where the link has `carried` so many by the end of the compute.

        Policies that copy (to the host) and those that do not are bounded apart. No less than by the best use of each
        second alone. And no less than if all of them went to policies that do not copy, and the link, which carries
        more with each, were used instead of some of it: each byte saves so much more then.
        """
        sums, start, rows = self.sums, span.start, span.rows
        by_second = np.maximum.accumulate(sums.efficiency[rows, start : span.last], axis=1)
        by_byte = np.maximum.accumulate(sums.copied_byte[rows, start : span.last], axis=1)
        copying = np.minimum.accumulate(sums.copying[start : span.last])
        with np.errstate(divide="ignore", invalid="ignore"):
            # Where no policy is of use, or copying takes no time, products and quotients may be no numbers.
            more = np.fmax(0.0, by_byte - copying * by_second)
            best = np.fmax(by_second, by_byte / copying)
            both = (need - more * carried) / (by_second + more * self.host)
            return np.where(need > 0, np.fmax(np.maximum(0.0, need / best), both), 0.0)

    def solve(self, start: int, stop: int, load: int) -> tuple[float, list[str]]:
        chosen = choose(self.profile, [self.slice(start, stop, load)], self.memory)
        if chosen is None:
            return np.inf, []
        seconds, policies = chosen
        return seconds / self.loads.loads[load].replicas, policies[0]


class MemoryCosts(SliceCosts):
    """The least bytes in which a slice runs at all."""

    @cached_property
    def floors(self) -> Floors:
        return Floors(self.sums.floors())

    def quick(self, span: Span) -> Floats:
        return np.maximum(0.0, self.sums.least(span, self.sums.keeping(span)))

    def solve(self, start: int, stop: int, load: int) -> tuple[float, list[str]]:
        return float(least_memory(self.profile, [self.slice(start, stop, load)])), []
