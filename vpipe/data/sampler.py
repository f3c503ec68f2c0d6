"""The order of the samples: a shuffled, deterministic one that resumes at any minibatch by its number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vpipe.data.dataset import Batch, Dataset
from vpipe.data.streams import Use, stream
from vpipe.errors import ConfigError


class SampleIndices(NamedTuple):
    epoch: int
    indices: list[int]


class Sampler:
    """From the number of a minibatch, counted over all epochs, to its samples.

    Nothing has to be saved: a run that resumes asks for the next number. Each epoch is a permutation of its
    own, drawn from (seed, epoch); its last minibatch may be smaller than the others.
    """

    def __init__(self, size: int, batch_size: int, seed: int) -> None:
        if size < 1:
            raise ConfigError("the data set has no samples: give more text")
        if batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size}: give 1 or more")
        self.size = size
        self.batch_size = batch_size
        self.seed = seed
        self._epoch = 0
        self._order = self._permutation(0)

    @property
    def minibatches_per_epoch(self) -> int:
        return -(-self.size // self.batch_size)

    def epoch_of(self, number: int) -> int:
        assert number >= 0, number
        return number // self.minibatches_per_epoch

    def minibatch(self, number: int) -> SampleIndices:
        epoch = self.epoch_of(number)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._permutation(epoch)
        first = number % self.minibatches_per_epoch * self.batch_size
        return SampleIndices(epoch, self._order[first : first + self.batch_size].tolist())

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        return stream(Use.SHUFFLE, self.seed, epoch).permutation(self.size)


@dataclass(frozen=True)
class Batches:
    """The batches of the minibatches from `start` to before `stop`; may be gone through again."""

    dataset: Dataset
    sampler: Sampler
    start: int
    stop: int

    def __post_init__(self) -> None:
        assert len(self.dataset) == self.sampler.size, (len(self.dataset), self.sampler.size)

    def __len__(self) -> int:
        return max(0, self.stop - self.start)

    def __iter__(self) -> Iterator[Batch]:
        for number in range(self.start, self.stop):
            epoch, indices = self.sampler.minibatch(number)
            yield self.dataset.batch(indices, epoch)
