"""The minibatches of a run as one rank sees them.

Every rank reads the same batches in the same order and uses of each what its stages need; nothing is relayed.
Minibatches are read an update at a time, because each one's share of the update's loss depends on the sizes of the
others.
"""

from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vpipe.system import faults

Fields = dict[str, Tensor]
KEPT_UPDATES = 4096
"""Far more than a pipeline has under way."""


class Minibatch(NamedTuple):
    """The identity of a minibatch."""

    number: int
    """Counted from the beginning of the run."""
    place: int
    """In the program that runs; replicas take turns by it."""
    update: int
    """The update that its gradients are part of."""


class Feed:
    def __init__(
        self,
        batches: Iterable[Any],
        normalise: Callable[[Any], Fields],
        weigh: Callable[[Fields], float],
        interval: int,
        start: int,
        wanted: Callable[[int], bool],
        read_fields: Set[str],
        device: torch.device,
    ) -> None:
        """`wanted` says by its place whether this rank uses a minibatch, `read_fields` which of its fields."""
        self.interval = interval
        self.offset = start  # the minibatch that the running program calls 0
        self.limit: int | None = None  # no minibatch from this one on, though the data may have more
        self.end = start  # minibatches read so far, counted from the beginning of the run
        self.admitted = start  # one more than the largest minibatch that was admitted
        self.first_batch: Fields | None = None
        self._batches: Iterator[Any] = iter(batches)
        self._normalise = normalise
        self._weigh = weigh
        self._wanted = wanted
        self._read_fields = read_fields
        self._device = device
        self._fields: dict[int, Fields] = {}
        self._shapes: dict[int, dict[str, torch.Size]] = {}
        self._weights: dict[int, float] = {}
        self._totals: dict[int, float] = {}  # update ▶ weight of all its minibatches
        self._exhausted = False

    def identify(self, place: int) -> Minibatch:
        number = self.offset + place
        return Minibatch(number, place, number // self.interval)

    def members(self, update: int) -> Iterator[Minibatch]:
        """The minibatches of an update that was read."""
        first = update * self.interval
        for number in range(first, min(first + self.interval, self.end)):
            yield Minibatch(number, number - self.offset, update)

    def read_until(self, number: int) -> None:
        """Read updates until this minibatch is there, or the data end."""
        while number >= self.end and not self._exhausted:
            self._read_update()

    def admit(self, number: int) -> bool:
        """Whether this minibatch was read and may be begun; from then on a program counts on it."""
        if number >= self.end or (self.limit is not None and number >= self.limit):
            return False
        self.admitted = max(self.admitted, number + 1)
        return True

    def fields(self, minibatch: Minibatch) -> Fields:
        return self._fields[minibatch.number]

    def shapes(self, minibatch: Minibatch) -> dict[str, torch.Size]:
        """The shapes of the fields, which outlive the values: backward needs them."""
        return self._shapes[minibatch.number]

    def weight(self, minibatch: Minibatch) -> float:
        return self._weights[minibatch.number]

    def share(self, minibatch: Minibatch) -> float:
        """The weight of this minibatch's loss in its update; the shares of an update add up to 1."""
        total = self._totals[minibatch.update]
        # An update whose minibatches all weigh nothing (no label at all) has no gradient.
        return self._weights[minibatch.number] / total if total else 0.0

    def forget_values(self, minibatch: Minibatch) -> None:
        """No stage of this rank reads the values any more; the shapes are still needed."""
        del self._fields[minibatch.number]

    def drop(self, minibatch: Minibatch) -> None:
        """No stage of this rank reads this minibatch any more."""
        self._fields.pop(minibatch.number, None)
        del self._shapes[minibatch.number], self._weights[minibatch.number]

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
            weight = self._weigh(fields)  # before the copy to a GPU, which weighing would wait for
            self._totals[update] += weight
            if self._wanted(self.end - self.offset):
                self._fields[self.end] = self._on_device(fields)
                self._shapes[self.end] = {name: tensor.shape for name, tensor in fields.items()}
                self._weights[self.end] = weight
            self.end += 1

    def _on_device(self, fields: Fields) -> Fields:
        """On a GPU, the fields that this rank reads: copied from pinned memory, without waiting."""
        if self._device.type == "cpu":
            return fields
        return {
            name: tensor.to(self._device)
            if tensor.is_cuda
            else tensor.pin_memory().to(self._device, non_blocking=True)
            for name, tensor in fields.items()
            if name in self._read_fields
        }


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
