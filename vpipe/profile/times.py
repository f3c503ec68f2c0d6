"""What the rounds on the bench come to: medians of each kind of block, and what a call takes beyond its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles
from typing import NamedTuple

from vpipe.profile.bench import (
    ADDING,
    AGAIN_BACKWARD,
    AGAIN_FORWARD,
    AGAIN_SPLIT,
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    SPLIT_FORWARD,
    UPDATE,
    VERSION,
    WEIGHT_GRADIENT,
    Bench,
)
from vpipe.profile.clocks import seconds
from vpipe.profile.swapping import ISSUED, ISSUED_SWAPPED


class Calls(NamedTuple):
    """Seconds that a call takes beyond those of the blocks that it runs."""

    forward: float = 0.0
    backward: float = 0.0
    update: float = 0.0

    @classmethod
    def beyond(cls, singles: Sequence[Sequence[Bench]], run: Bench) -> Calls:
        """From blocks that ran one by one, and some of the same kinds in one go."""

        def apart(phase: str) -> float:
            alone = sum(median(_pooled(benches, phase)) for benches in singles)
            return max(0.0, (alone - median(_pooled([run], phase))) / (len(singles) - 1))

        return cls(apart(FORWARD), apart(BACKWARD), apart(UPDATE))


NO_CALLS = Calls()


def _pooled(benches: Sequence[Bench], phase: str) -> list[float]:
    return [seconds(lap) for bench in benches for lap in bench.laps[phase]]


class Times:
    """Medians over the rounds of all benches of a kind, without what each call took beyond its blocks."""

    def __init__(self, benches: Sequence[Bench], calls: Calls = NO_CALLS) -> None:
        def pooled(phase: str) -> list[float]:
            return _pooled(benches, phase)

        self.forward = max(0.0, median(pooled(FORWARD)) - calls.forward)
        whole = median(pooled(BACKWARD))
        backward = max(0.0, whole - calls.backward)
        first, second = median(pooled(INPUT_GRADIENT)), median(pooled(WEIGHT_GRADIENT))
        # Most schedules run backward whole: the split one tells the shares, and what it takes more.
        share = first / (first + second) if first + second else 1.0
        self.input_gradient = backward * share
        self.weight_gradient = backward - self.input_gradient
        split = median(pooled(SPLIT_FORWARD)) + first + second
        self.splitting = max(0.0, split - median(pooled(FORWARD)) - whole)
        self.accumulating = max(0.0, median(pooled(ADDING)) - whole)
        repeated = median(pooled(AGAIN_FORWARD)) + median(pooled(AGAIN_BACKWARD))
        self.recomputing = max(0.0, repeated - median(pooled(FORWARD)) - whole)
        in_parts = sum(median(pooled(phase)) for phase in AGAIN_SPLIT)
        self.split_recomputing = max(0.0, in_parts - split)
        self.swapping = 0.0
        if swapped := pooled(ISSUED_SWAPPED):
            plain = max(median(pooled(ISSUED)), median(pooled(FORWARD)) + whole)
            self.swapping = max(0.0, median(swapped) - plain)
        update = median(pooled(UPDATE))
        self.update = max(0.0, update - calls.update)
        self.version = max(0.0, median(pooled(VERSION)) - update)
        both = [
            seconds(f) + seconds(b)
            for bench in benches
            for f, b in zip(bench.laps[FORWARD][::2], bench.laps[BACKWARD], strict=True)
        ]
        quarters = quantiles(both, n=4) if len(both) > 1 else [0.0, 0.0, 0.0]
        self.spread = (quarters[2] - quarters[0]) / median(both) if median(both) else 0.0
