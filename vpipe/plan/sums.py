"""Sums over the blocks before each cut: the bytes of all slices from a block on, by load."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vpipe.cost import POLICIES, Profile, input_bytes
from vpipe.plan.loads import Loads
from vpipe.plan.model import copies
from vpipe.plan.stage_bounds import Floor

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]


class Span(NamedTuple):
    """Slices that begin with one block and end behind it, at the latest before `last`; `rows` are their loads."""

    start: int
    last: int
    rows: Rows

    @property
    def ends(self) -> slice:
        return slice(self.start + 1, self.last + 1)


class Sums:
    """Sums over the blocks before each cut, and the memory of all slices by load."""

    def __init__(self, profile: Profile, loads: Loads) -> None:
        blocks = profile.blocks
        self.blocks = len(blocks)
        kept = np.array([block.kept_bytes for block in blocks], dtype=float)
        boundary = np.array([block.boundary_bytes for block in blocks], dtype=float)
        entered = np.concatenate([[0.0], boundary[:-1]])
        self.kept = _before(kept)
        self.compute = _before([block.forward + block.backward for block in blocks])
        self.update = _before([block.update for block in blocks])
        self.version = _before([block.version for block in blocks])
        self.parameters = _before([block.parameter_bytes for block in blocks])
        self.buffers = 2 * np.concatenate([entered, [0.0]])  # of the cut before each block; none at the ends
        self.in_flight = in_flight = column(load.in_flight for load in loads.loads)
        self.deferred = _before([block.deferred for block in blocks])
        self.waiting = column(load.waiting for load in loads.loads)
        self.split = column(load.split for load in loads.loads)
        self.fresh = column(load.fresh for load in loads.loads)
        self.asynchronous = column(load.asynchronous for load in loads.loads)
        self.updating = _before([block.update_bytes for block in blocks])
        # By load and block, the best that any policy offers.
        shape = (len(loads.loads), len(blocks))
        least, others, begun = (np.full(shape, np.inf) for _ in range(3))
        # Saved, by second or copied byte.
        self.efficiency, self.copied_byte = np.zeros(shape), np.zeros(shape)
        self.copying, copyable = np.full(len(blocks), np.inf), np.zeros(len(blocks))
        for policy in POLICIES.values():
            lying = column(policy.minibatches(profile.device, load.in_flight) for load in loads.loads)
            lying = np.minimum(lying, in_flight)
            inputs = [input_bytes(blocks, number) for number in range(len(blocks))]
            held, rebuilt = (
                np.array([ask(*both) for both in zip(blocks, inputs, strict=True)], dtype=float)
                for ask in (policy.held, policy.rebuilt)
            )
            seconds = np.array([policy.seconds(block) for block in blocks])
            copied = np.array([policy.copied(block) for block in blocks], dtype=float)
            saved = np.maximum(0.0, in_flight * kept - lying * held)
            with np.errstate(divide="ignore", invalid="ignore"):
                by_second = np.where((saved > 0) & (copied == 0), saved / seconds, 0.0)
                by_byte = np.where(copied > 0, saved / copied, 0.0)
                spent = np.where(copied > 0, seconds / copied, np.inf)
            self.efficiency = np.maximum(self.efficiency, by_second)
            self.copied_byte = np.maximum(self.copied_byte, by_byte)
            self.copying = np.minimum(self.copying, spent)
            copyable = np.maximum(copyable, copied)
            least = np.minimum(least, lying * held)
            others = np.minimum(others, (lying - 1) * held)
            begun = np.minimum(begun, lying * held + rebuilt)
        self.copyable = _before(copyable)
        self.savable = _before(in_flight * kept - least)
        self.others = _before(others)
        # A backward begins with the slice's last block: that is there whole then, and what it makes for itself.
        self.working = np.array([block.working_bytes for block in blocks], dtype=float)
        self.last = begun - least + self.working
        self.copies = column(copies(profile, load) for load in loads.loads)
        self.profile = profile
        own = np.array([block.parameter_bytes for block in blocks], dtype=float)
        for tie in profile.tied:
            own[list(tie.blocks)] -= tie.bytes
        self.own_parameters = _before(np.maximum(0.0, own))

    def shared(self, span: Span) -> Floats:
        """Parameter bytes that slices count more than once, by stop."""
        start = span.start
        found = np.zeros(span.last - start)
        for tie in self.profile.tied:
            for block in [block for block in tie.blocks if block >= start][1:]:
                found[block - start :] += tie.bytes
        return found

    def keeping(self, span: Span) -> Floats:
        """The bytes of slices that keep everything, by load and stop; what a running backward adds, and what is
        shared with other slices, is left out."""
        start, ends, rows = span.start, span.ends, span.rows
        weights = self.copies[rows] * (self.parameters[ends] - self.parameters[start] - self.shared(span))
        kept = self.in_flight[rows] * (self.kept[ends] - self.kept[start])
        deferred = self.waiting[rows] * (self.deferred[ends] - self.deferred[start])
        buffers = self.buffers[start] + self.buffers[ends] + self.profile.device.workspace
        return np.asarray(weights + kept + deferred + buffers)

    def least(self, span: Span, keeping: Floats) -> Floats:
        """Fewer bytes than any policies could do with, by those of `keeping`.

        When the first part of a split backward ends, the minibatch waits whole, beside what the others hold. When an
        update runs the minibatch is gone; in synchronous schedules all are.
        """
        start, ends, rows = span.start, span.ends, span.rows
        savable = self.savable[rows, ends] - self.savable[rows, start, None]
        least = keeping - savable + self.last[rows, start : span.last]
        others = self.others[rows, ends] - self.others[rows, start, None]
        kept, deferred = self.kept[ends] - self.kept[start], self.deferred[ends] - self.deferred[start]
        bare = keeping - self.in_flight[rows] * kept
        if self.split.any():
            least = np.where(self.split[rows] > 0, np.maximum(least, bare + deferred + others), least)
        if self.updates:
            needed = bare - self.waiting[rows] * deferred + self.updating[ends] - self.updating[start]
            needed = needed + self.asynchronous[rows] * others
            parameters = self.parameters[ends] - self.parameters[start] - self.shared(span)
            least = np.maximum(least, needed + self.fresh[rows] * parameters)
        return np.asarray(least - 1)

    @property
    def updates(self) -> bool:
        """Whether an update may need more than a backward."""
        return bool(self.fresh.any() or self.updating[-1])

    def floors(self) -> list[Floor]:
        """Of the bytes: `least` without messages and shared parameters."""
        bare = self.copies * self.own_parameters + self.waiting * self.deferred
        fixed = np.full_like(self.in_flight, self.profile.device.workspace - 1.0)
        found = [Floor(bare + self.in_flight * self.kept - self.savable, fixed)]
        if self.split.any():
            found.append(Floor(np.where(self.split > 0, bare + self.deferred + self.others, 0.0), fixed))
        if self.updates:
            needed = (self.copies + self.fresh) * self.own_parameters + self.updating
            found.append(Floor(needed + self.asynchronous * self.others, fixed))
        return found


def _before(values: Iterable[float] | Floats) -> Floats:
    """Sums of what stands before each position, along the last axis."""
    array = np.asarray(values if isinstance(values, np.ndarray) else list(values), dtype=float)
    return np.concatenate([np.zeros((*array.shape[:-1], 1)), np.cumsum(array, axis=-1)], axis=-1)


def column(values: Iterable[float]) -> Floats:
    return np.array(list(values), dtype=float)[:, None]
