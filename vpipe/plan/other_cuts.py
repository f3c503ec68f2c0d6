"""Partitions that differ from one in a single cut."""

from __future__ import annotations

import numpy as np

from vpipe.plan.paths import Cuts


def neighbours(cuts: Cuts) -> Cuts:
    """Each cut one block to the left and to the right."""
    moved = []
    for place in range(1, len(cuts) - 1):
        for by in (-1, 1):
            if cuts[place - 1] < cuts[place] + by < cuts[place + 1]:
                other = cuts.copy()
                other[place] += by
                moved.append(other)
    return np.array(moved)


def elsewhere(cuts: Cuts) -> Cuts:
    """Each cut at every other place: two stages become one, and another becomes two."""
    free = np.setdiff1d(np.arange(cuts[-1]), cuts)
    moved = [
        np.sort(np.column_stack((np.tile(np.delete(cuts, place), (len(free), 1)), free)), axis=1)
        for place in range(1, len(cuts) - 1)
    ]
    return np.concatenate(moved) if moved else np.empty((0, len(cuts)), dtype=int)
