"""The choice of `compress: auto`: links are compressed where that makes a simulated update shorter."""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

from vpipe.cost import Plan, Profile
from vpipe.cost.compression import BF16, FLOAT32, INT8, HostPair, with_compression
from vpipe.simulate import simulate

WORTH = 0.03
"""The share of an update that a mode must save to be chosen: a prediction is no better than that."""


class ChosenCompression(NamedTuple):
    modes: dict[HostPair, str]
    """Of pairs of hosts; the others are not compressed."""
    before: float
    after: float
    """Simulated seconds of an update without them and with them."""


def choose_compression(profile: Profile, plan: Plan, itemsize: int = FLOAT32) -> ChosenCompression:
    """For each pair of hosts bf16 or, if that saves much more, int8; never int4, which costs loss."""
    assert profile.hosts is not None

    def seconds(modes: dict[HostPair, str]) -> float:
        both = {pair: (mode, mode) for pair, mode in modes.items()}
        return simulate(with_compression(profile, both, itemsize=itemsize), plan).step_time

    chosen: dict[HostPair, str] = {}
    before = best = seconds({})
    for pair in combinations(range(len(profile.hosts.ranks)), 2):
        for mode in (BF16, INT8):
            found = seconds(chosen | {pair: mode})
            if found < best * (1 - WORTH):
                chosen[pair], best = mode, found
    return ChosenCompression(chosen, before, best)
