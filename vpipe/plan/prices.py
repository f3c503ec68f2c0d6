"""A price for bytes, which tells what blocks can save in time: the dual of the choice of counts.

A choice takes max(compute + longer, copies), so for any share from 0 to 1 no less than

    share x (compute + longer) + (1 - share) x copies

If each byte that is saved is paid for, every block can be looked at by itself: it is kept, recomputed or swapped,
whichever earns most. No choice takes less than the price of all bytes that are needed, less what all blocks earn.
That holds for any share and price. The best of them know, unlike the bound of `branch.py`, that a block is not both
recomputed and swapped; and what earns most at the price where just enough is saved is a good choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

SHARES = np.linspace(0.0, 1.0, 17)[:, None]
HALVINGS = 20
RANGE = 1e9
"""Of the prices that are tried: from this part of the highest on."""

Floats = npt.NDArray[np.float64]
Counts = list[tuple[int, int]]


class Group(NamedTuple):
    """Equal blocks, and what one of them gives."""

    kept: int
    again: float
    """Seconds of recomputing it."""
    recompute: int
    """Bytes that recomputing it saves."""
    swap: int
    """Bytes that swapping it saves."""
    swapping: float
    """Seconds of swapping it, beyond the copies."""
    blocks: int


class Prices(NamedTuple):
    share: float
    byte: float
    earned: list[float]
    """By the groups from each one on."""
    counts: Counts | None
    """Of the blocks that are recomputed and swapped at this price, no more than are needed; None if it is too low."""

    def least_seconds(self, index: int, need: int, computed: float, copied: float) -> float:
        """A bound for choices in which the groups from `index` on save `need` bytes, by what those before take."""
        share = self.share
        return share * computed + (1 - share) * copied + self.byte * need - self.earned[index]


def best_prices(groups: Sequence[Group], need: int, compute: float, host: float) -> Prices:
    """Those with nearly the highest bound for saving `need` bytes, which the groups can."""
    kept, again, recompute, swap, swapping, blocks = np.array(groups, dtype=float).T
    repeating, moving = SHARES * again, SHARES * swapping + (1 - SHARES) * kept / host
    dearest = np.maximum(_each(repeating, recompute), _each(moving, swap)).max(axis=1, keepdims=True)
    high = 100 * dearest + np.finfo(float).tiny
    low = high / RANGE
    for _ in range(HALVINGS):
        middle = np.sqrt(low) * np.sqrt(high)
        by_recomputing, by_swapping = middle * recompute - repeating, middle * swap - moving
        saved = np.where(by_recomputing > by_swapping, recompute, swap)
        saved = np.where(np.maximum(by_recomputing, by_swapping) > 0, saved, 0.0)
        enough = (saved @ blocks >= need)[:, None]
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    by_recomputing, by_swapping = high * recompute - repeating, high * swap - moving
    earned = np.maximum(0.0, np.maximum(by_recomputing, by_swapping))
    bounds = SHARES[:, 0] * compute + high[:, 0] * need - earned @ blocks
    best = int(bounds.argmax())
    total = [*np.cumsum((earned[best] * blocks)[::-1])[::-1].tolist(), 0.0]
    counts = _counts(groups, need, earned[best], by_recomputing[best] > by_swapping[best])
    return Prices(float(SHARES[best, 0]), float(high[best, 0]), total, counts)


def _each(seconds: Floats, saved: Floats) -> Floats:
    """Seconds for each byte that is saved; none where none is."""
    return np.where(saved > 0, seconds / np.where(saved > 0, saved, 1.0), 0.0)


def _counts(
    groups: Sequence[Group], need: int, earned: Floats, recomputed: npt.NDArray[np.bool_]
) -> Counts | None:
    """Those that earn most, while bytes are missing."""
    counts: Counts = [(0, 0)] * len(groups)
    for index in np.argsort(-earned, kind="stable").tolist():
        group = groups[index]
        saved = group.recompute if recomputed[index] else group.swap
        if need > 0 and saved:
            count = min(group.blocks, -(-need // saved))
            counts[index] = (count, 0) if recomputed[index] else (0, count)
            need -= count * saved
    return None if need > 0 else counts
