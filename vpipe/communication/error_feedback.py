"""Error feedback: what compression loses of a gradient is added to the gradient of the next update.

    update 0    wanted = gradient              sent = compressed(wanted)    lost = wanted - sent
    update 1    wanted = gradient + lost       ...

So what is lost never adds up: the sums of all updates differ from those without compression by what the last one lost.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from vpipe.communication.compression import NONE, pack, unpack, wire_form


class ErrorFeedback:
    """Of one rank and one bucket of gradients. `clear` forgets what was lost."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self._lost: dict[Hashable, Tensor] = {}
        self._scale = 1.0

    def begin(self, scale: float) -> None:
        """The next gradients are multiplied by this."""
        if scale != self._scale:
            for lost in self._lost.values():
                lost.mul_(scale / self._scale)
            self._scale = scale

    def clear(self) -> None:
        self._lost.clear()

    def wire_bytes(self, count: int, dtype: torch.dtype) -> int:
        _, (size,), sent = wire_form(self.mode, (count,), dtype)
        return size * sent.itemsize

    def pack(self, part: Hashable, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """The bytes to send for this part of the gradients, and the numbers that they stand for."""
        mode, _, _ = wire_form(self.mode, gradient.shape, gradient.dtype)
        if mode == NONE:
            return gradient.view(torch.uint8), gradient
        wanted = gradient.float()
        if part in self._lost:
            wanted = wanted + self._lost[part]
        packed = pack(wanted, mode)
        arrived = unpack(packed, mode, gradient.shape, gradient.dtype)
        # What is not finite makes the update be skipped; it must not stay.
        self._lost[part] = (wanted - arrived.float()).nan_to_num_(0.0, 0.0, 0.0)
        return packed, arrived

    def unpack(self, packed: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        mode, _, _ = wire_form(self.mode, (count,), dtype)
        # Bytes behind others need not be aligned.
        return packed.clone().view(dtype) if mode == NONE else unpack(packed.clone(), mode, (count,), dtype)
