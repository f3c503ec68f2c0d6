"""What a data set is, and how it is split into training and validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vpipe.data.streams import Use, stream
from vpipe.errors import ConfigError

Batch = dict[str, Tensor]
IGNORED = -100
"""The label that a loss leaves out."""


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
