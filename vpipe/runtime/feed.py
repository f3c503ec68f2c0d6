"""The minibatches of a run as one rank sees them.

Every rank reads the same batches in the same order and uses of each what its stages need; nothing is
relayed. Minibatches are read an update at a time, because each one's share of the update's loss depends
on the sizes of the others.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from vpipe.system import faults

Fields = dict[str, Tensor]
KEPT_UPDATES = 4096
"""Far more than a pipeline has under way."""


class Feed:
    def __init__(
        self,
        batches: Iterable[Any],
        normalise: Callable[[Any], Fields],
        weigh: Callable[[Fields], float],
        interval: int,
        start: int = 0,
        wanted: Callable[[int], bool] = lambda place: True,
        place: Callable[[Fields], Fields] = lambda fields: fields,
    ) -> None:
        self.interval = interval
        self.offset = start  # the minibatch that the running program calls 0
        self.limit: int | None = None  # no minibatch from this one on, though the data may have more
        self.end = start  # minibatches read so far, counted from the beginning of the run
        self.admitted = start  # one more than the largest minibatch that was said to exist
        self.first_batch: Fields | None = None
        self._batches: Iterator[Any] = iter(batches)
        self._normalise = normalise
        self._weigh = weigh
        self._wanted = wanted  # a replica does not keep the other replicas' minibatches
        self._place = place  # on the rank's device; after the weighing, which would wait for it
        self._fields: dict[int, Fields] = {}
        self._shapes: dict[int, dict[str, torch.Size]] = {}
        self._weights: dict[int, float] = {}
        self._totals: dict[int, float] = {}  # update ▶ weight of all its minibatches
        self._exhausted = False

    def exists(self, minibatch: int) -> bool:
        if self.limit is not None and minibatch >= self.limit:
            return False
        while minibatch >= self.end and not self._exhausted:
            self._read_update()
        if minibatch < self.end:
            self.admitted = max(self.admitted, minibatch + 1)
            return True
        return False

    def count(self, most: int) -> int:
        """How many of the `most` minibatches from `offset` on there are."""
        return sum(self.exists(m) for m in range(self.offset, self.offset + most))

    def fields(self, minibatch: int) -> Fields:
        return self._fields[minibatch]

    def shapes(self, minibatch: int) -> dict[str, torch.Size]:
        """The shapes of the fields, which outlive the values: backward asks for them."""
        return self._shapes[minibatch]

    def weight(self, minibatch: int) -> float:
        return self._weights[minibatch]

    def share(self, minibatch: int) -> float:
        """The weight of this minibatch's loss in its update; the shares of an update add up to 1."""
        total = self._totals[minibatch // self.interval]
        # An update whose minibatches all weigh nothing (no label at all) has no gradient.
        return self._weights[minibatch] / total if total else 0.0

    def forget_values(self, minibatch: int) -> None:
        """Nobody on this rank reads the values any more; the shapes are still asked for."""
        del self._fields[minibatch]

    def drop(self, minibatch: int) -> None:
        """Nobody on this rank reads this minibatch any more."""
        self._fields.pop(minibatch, None)
        del self._shapes[minibatch], self._weights[minibatch]

    def leftovers(self) -> list[str]:
        return [f"minibatch {m} was read and not used" for m in self._shapes if m < self.admitted]

    def _read_update(self) -> None:
        update = self.end // self.interval
        faults.point("data", self.end)
        self._totals[update] = 0.0
        self._totals.pop(update - KEPT_UPDATES, None)
        for _ in range(self.interval):
            batch = next(self._batches, None)
            if batch is None:
                self._exhausted = True
                return
            fields = self._normalise(batch)
            if self.first_batch is None:
                self.first_batch = fields
            weight = self._weigh(fields)
            self._totals[update] += weight
            if self._wanted(self.end - self.offset):
                self._fields[self.end] = self._place(fields)
                self._shapes[self.end] = {name: tensor.shape for name, tensor in fields.items()}
                self._weights[self.end] = weight
            self.end += 1


def count_labels(fields: Fields) -> float:
    """The weight of a minibatch whose loss is a mean over its labels, of which -100 does not count."""
    labels = fields.get("labels")
    return count_samples(fields) if labels is None else float((labels != -100).sum())


def count_samples(fields: Fields) -> float:
    """The default weight of a minibatch: its size along the first dimension."""
    for tensor in fields.values():
        if tensor.dim():
            return float(tensor.shape[0])
    return 1.0
