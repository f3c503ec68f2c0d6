"""The share of the cards' peak that a run uses (`mfu`): the flops of its model's products over what the cards could do.

The products of the captured graph count, as in the plain model: forward once, backward twice as much. What is
recomputed does not count, nor does anything that is no product.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vpipe.system.card_peak import device_peak
from vpipe.system.device import card_identity
from vpipe.system.host_identity import host_identity

if TYPE_CHECKING:
    from vpipe.pipeline import Pipeline

PASSES = 3
"""Forwards that a forward and a backward amount to."""


class Utilization:
    """Every rank makes one, at the same time; `peak_tflops` is that of a card, or else of a host, if it is given."""

    def __init__(self, pipe: Pipeline, peak_tflops: float | None = None) -> None:
        flops = sum(block.flops for block in pipe.layout.graph.blocks)
        self._flops = PASSES * flops * pipe.schedule.update_interval
        peak = device_peak(pipe.device, pipe.layout.precision) if peak_tflops is None else 1e12 * peak_tflops
        mine = [card_identity(pipe.device) or host_identity(), peak]
        # Ranks that share a card share its peak.
        peaks = dict(pipe.world.all_gather("peak", mine))
        self.peak: float | None = None if None in peaks.values() else sum(peaks.values())

    def mfu(self, seconds_per_update: float) -> dict[str, float]:
        """By its name; nothing where the peak is not known."""
        if not self.peak or not seconds_per_update:
            return {}
        return {"mfu": self._flops / seconds_per_update / self.peak}
