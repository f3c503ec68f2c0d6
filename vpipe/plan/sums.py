"""Sums over the blocks before each cut: the bytes of all slices from a block on, by load."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vpipe.cost import Profile
from vpipe.plan.loads import Loads
from vpipe.plan.model import copies
from vpipe.plan.reach import Floor

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
        forward = np.array([block.forward for block in blocks])
        again = np.array([block.again for block in blocks])
        self.kept = _before(kept)
        self.compute = _before(forward + np.array([block.backward for block in blocks]))
        self.update = _before([block.update for block in blocks])
        self.version = _before([block.version for block in blocks])
        self.parameters = _before([block.parameter_bytes for block in blocks])
        self.buffers = 2 * np.concatenate([entered, [0.0]])  # of the cut before each block; none at the ends
        in_flight = column(load.in_flight for load in loads.loads)
        self.in_flight = in_flight
        lying = column(profile.device.lying(load.in_flight) for load in loads.loads)
        self.swap_rate = np.maximum(0.0, in_flight - lying)
        self.deferred = _before([block.deferred for block in blocks])
        self.waiting = column(load.waiting for load in loads.loads)
        saved = np.maximum(0.0, in_flight * (kept - entered))
        with np.errstate(divide="ignore"):
            self.efficiency = np.where(saved > 0, saved / np.where(saved > 0, again, 1.0), 0.0)
        taken = np.array([block.swapping for block in blocks])
        self.swapping = np.where(kept > 0, taken / np.where(kept > 0, kept, 1.0), np.inf)  # of a byte
        self.savable = _before(np.maximum(saved, self.swap_rate * kept))
        self.split = column(load.split for load in loads.loads)
        self.fresh = column(load.fresh for load in loads.loads)
        self.asynchronous = column(load.asynchronous for load in loads.loads)
        self.updating = _before([block.update_bytes for block in blocks])
        swapped = (in_flight - self.swap_rate - 1) * kept
        self.others = _before(np.minimum((in_flight - 1) * np.minimum(kept, entered), swapped))
        # A backward begins with the slice's last block: that lies there whole then, and what it makes for itself.
        self.working = np.array([block.working_bytes for block in blocks], dtype=float)
        bare = in_flight * kept - np.maximum(saved, self.swap_rate * kept)
        begun = np.minimum(in_flight * kept, (in_flight - self.swap_rate) * kept)
        begun = np.minimum(begun, (in_flight - 1) * np.minimum(kept, entered) + kept)
        self.last = begun - bare + self.working
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
