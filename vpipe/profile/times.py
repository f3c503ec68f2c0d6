"""Times of blocks from the rounds that were measured: medians of each kind, and the cost of a call."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles
from typing import NamedTuple

from vpipe.profile.measured_stage import MeasuredStage, seconds
from vpipe.profile.rounds import (
    BACKWARD,
    FORWARD,
    HOST,
    HOST_SWAPPING,
    INPUT_GRADIENT,
    RECOMPUTING_BACKWARD,
    RECOMPUTING_FORWARD,
    SECOND_BACKWARD,
    SPLIT_FORWARD,
    SPLIT_RECOMPUTING,
    UPDATE,
    VERSION,
    WEIGHT_GRADIENT,
)

SMALLEST = 5e-7
"""Seconds that a GPU's events can tell apart: no forward and no backward counts as less."""


class CallTimes(NamedTuple):
    """Seconds that a call takes in addition to the blocks that it runs."""

    forward: float = 0.0
    backward: float = 0.0
    update: float = 0.0


NO_CALLS = CallTimes()


class BlockTimes(NamedTuple):
    """Seconds of a kind of block, under the names of `BlockCost`."""

    forward: float
    input_gradient: float
    weight_gradient: float
    update: float
    spread: float
    version: float
    splitting: float
    accumulating: float
    recomputing: float | None
    split_recomputing: float | None
    swapping: float


def call_times(singles: Sequence[Sequence[MeasuredStage]], run: MeasuredStage) -> CallTimes:
    """From blocks that were run one by one, and a stage of some of the same kinds."""

    def of(phase: str) -> float:
        one_by_one = sum(median(_pooled(stages, phase)) for stages in singles)
        return max(0.0, (one_by_one - median(_pooled([run], phase))) / (len(singles) - 1))

    return CallTimes(of(FORWARD), of(BACKWARD), of(UPDATE))


def block_times(stages: Sequence[MeasuredStage], calls: CallTimes = NO_CALLS) -> BlockTimes:
    """Medians over the rounds of all stages of a kind, without the cost of the calls.

    A time that is a difference of medians can come out negative: the noise is larger than the time. It then counts as
    the smallest that can be measured, or as not known where the planner would take it for free, and `spread` shows how
    far off it was.
    """

    def middle(phase: str) -> float:
        return median(_pooled(stages, phase))

    forward, backward, update = middle(FORWARD), middle(BACKWARD), middle(UPDATE)
    first, second = middle(INPUT_GRADIENT), middle(WEIGHT_GRADIENT)
    split = middle(SPLIT_FORWARD) + first + second
    recomputing = middle(RECOMPUTING_FORWARD) + middle(RECOMPUTING_BACKWARD) - forward - backward
    split_recomputing = sum(map(middle, SPLIT_RECOMPUTING)) - split
    own_forward, own_backward = forward - calls.forward, backward - calls.backward
    noise = -min(own_forward, own_backward, recomputing, split_recomputing)
    # Most schedules run backward whole: the split one gives the shares, and its additional time.
    share = first / (first + second) if first + second else 1.0
    input_gradient = max(SMALLEST, own_backward) * share
    swapping = 0.0
    if swapped := _pooled(stages, HOST_SWAPPING):
        swapping = max(0.0, median(swapped) - max(middle(HOST), forward + backward))
    return BlockTimes(
        forward=max(SMALLEST, own_forward),
        input_gradient=input_gradient,
        weight_gradient=max(SMALLEST, own_backward) - input_gradient,
        update=max(0.0, update - calls.update),
        spread=_spread(stages, noise),
        version=max(0.0, middle(VERSION) - update),
        splitting=max(0.0, split - forward - backward),
        accumulating=max(0.0, middle(SECOND_BACKWARD) - backward),
        recomputing=recomputing if recomputing > 0 else None,
        split_recomputing=split_recomputing if split_recomputing > 0 else None,
        swapping=swapping,
    )


def _spread(stages: Sequence[MeasuredStage], noise: float) -> float:
    """The range of the middle half of the times of F and B, at least `noise`, as a share of their median."""
    both = [
        seconds(forward) + seconds(backward)
        for stage in stages
        for forward, backward in zip(stage.intervals[FORWARD][::2], stage.intervals[BACKWARD], strict=True)
    ]
    low, _, high = quantiles(both, n=4) if len(both) > 1 else [0.0, 0.0, 0.0]
    return max(high - low, noise) / median(both) if median(both) else 0.0


def _pooled(stages: Sequence[MeasuredStage], phase: str) -> list[float]:
    return [seconds(interval) for stage in stages for interval in stage.intervals[phase]]
