"""Losses of runs, made comparable: smoothed, and where each run was as low as another one at its end."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

LAST_SHARE = 0.1
"""The loss at an update is the mean over so many updates before it, as a share of the whole run."""


def span(count: int) -> int:
    """Of so many losses those that one mean is over."""
    return max(1, round(LAST_SHARE * count))


def final_loss(losses: Sequence[float]) -> float:
    return fmean(losses[-span(len(losses)) :])


def smoothed(losses: Sequence[float]) -> list[float]:
    """At each update the mean over so many updates as the loss at the end is a mean of."""
    width = span(len(losses))
    total, result = 0.0, []
    for number, loss in enumerate(losses):
        total += loss - (losses[number - width] if number >= width else 0.0)
        result.append(total / min(width, number + 1))
    return result


def reached(losses: Sequence[float], goal: float) -> int | None:
    """The first place at which a whole mean is this low; None: it never is."""
    width, slack = span(len(losses)), 1e-12 * abs(goal)  # sums in another order differ by so much
    return next(
        (
            number
            for number, mean in enumerate(smoothed(losses))
            if mean <= goal + slack and number + 1 >= width
        ),
        None,
    )
