"""Data sets: their samples, the split into training and validation, and the order in which samples are trained on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vpipe.errors import ConfigError

Batch = dict[str, Tensor]
IGNORED = -100
"""The label that a loss leaves out."""


class Use(IntEnum):
    """The purpose of a random stream: two purposes never share numbers, whatever their seeds are."""

    SHUFFLE = 1
    SPLIT = 2
    MASKING = 3
    SYNTHETIC = 4
    OWN = 5


def stream(use: Use, *numbers: int) -> np.random.Generator:
    """Random numbers that depend on these numbers alone (seed, epoch, sample): the same in every process."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([use, *map(int, numbers)])))


class Dataset(Protocol):
    """Samples of equal length; what is random in a sample depends on the seed, the epoch and the sample."""

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int], epoch: int) -> Batch:
        """The fields that the model reads, one row a sample."""
        ...


@dataclass(frozen=True, eq=False)
class Subset:
    """Some samples of a data set, which remain what they are there."""

    dataset: Dataset
    chosen: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.chosen)

    def batch(self, indices: Sequence[int], epoch: int) -> Batch:
        return self.dataset.batch(self.chosen[list(indices)].tolist(), epoch)


def split(dataset: Dataset, validation_share: float, seed: int) -> tuple[Subset, Subset]:
    """Training and validation: disjoint, together everything, at least one sample each."""
    if not 0 < validation_share < 1:
        raise ConfigError(f"validation_share is {validation_share}: give a number between 0 and 1")
    size = len(dataset)
    if size < 2:
        raise ConfigError(
            f"the data set has {size} sample, but training and validation need one each: give more text or a "
            "smaller sequence_length, or leave validation out"
        )
    held_out = min(max(1, round(validation_share * size)), size - 1)
    order = stream(Use.SPLIT, seed).permutation(size)
    return Subset(dataset, np.sort(order[held_out:])), Subset(dataset, np.sort(order[:held_out]))


class Sampler:
    """From the number of a minibatch, counted over all epochs, to its samples.

    Nothing has to be saved: a run that resumes takes the next number. Each epoch is a permutation of its
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

    def minibatch(self, number: int) -> tuple[int, list[int]]:
        """Its epoch and its samples."""
        epoch = self.epoch_of(number)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._permutation(epoch)
        first = number % self.minibatches_per_epoch * self.batch_size
        return epoch, self._order[first : first + self.batch_size].tolist()

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        return stream(Use.SHUFFLE, self.seed, epoch).permutation(self.size)


@dataclass(frozen=True)
class Batches:
    """The batches of the minibatches from `start` to before `stop`; may be iterated again."""

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
