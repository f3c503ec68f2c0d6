"""Random numbers that depend on the numbers they are named by, and on nothing else."""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Use(IntEnum):
    """What a stream is for: two uses never share numbers, whatever their seeds are."""

    SHUFFLE = 1
    SPLIT = 2
    MASKING = 3
    SYNTHETIC = 4


def stream(use: Use, *numbers: int) -> np.random.Generator:
    """The generator of these numbers, such as seed, epoch and sample: the same in every process."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([use, *map(int, numbers)])))
