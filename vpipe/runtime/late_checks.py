"""Checks that gradients are finite, without waiting for the GPU that computes them.

The flag stays on the device: a fused optimizer, or Muon, reads it there, and leaves weights and state unchanged if it
is set. It is copied to the host asynchronously, and read some updates later, or when the pipeline is drained. If the
run is to stop then, the flag stays set: no update is made after the bad one, as if the host had read it at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from vpipe.system.device import copied_to_host

LATE = 2
"""Updates of a stage that a host may be ahead of what it has read."""


class LateChecks:
    def __init__(self, *, stops: bool) -> None:
        self._stops = stops
        self._bad: Tensor | None = None  # on the device: whether any update was bad so far
        self._coming: deque[tuple[int, int, Tensor, torch.cuda.Event | None]] = deque()

    def flag(self, norm: Tensor) -> Tensor:
        """1 if gradients of this norm make no update, else 0; on the device."""
        found = (~norm.isfinite()).float()
        if self._stops:
            self._bad = found = found if self._bad is None else torch.maximum(self._bad, found)
        return found

    def note(self, update: int, stage: int, flag: Tensor) -> None:
        """The update was launched with this flag, which the host reads later."""
        self._coming.append((update, stage, *copied_to_host(flag)))

    def skipped(self, *, all_of_them: bool = False) -> Iterator[tuple[int, int]]:
        """Update and stage of those that were not made, of the checks that the host reads now."""
        while len(self._coming) > (0 if all_of_them else LATE):
            update, stage, flag, copied = self._coming.popleft()
            if copied is not None:
                copied.synchronize()
            if flag.item():
                yield update, stage
