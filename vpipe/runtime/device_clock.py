"""When a rank's actions ran on its GPU, without waiting for it: an event behind each action, read once it has passed.

The host issues actions ahead of the GPU, so its own clock tells nothing. On one stream an action begins where the one
before it ended: a receive lasts as long as the stream waited for the tensor, a forward as long as it computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from time import perf_counter
from typing import Generic, TypeVar

import torch

T = TypeVar("T")

REBASE = 4096
"""Events after which times are counted from a later one: CUDA tells them as float32."""


class DeviceClock(Generic[T]):
    """Marks of type T on the device's current stream, in the time of `time.perf_counter`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pending: deque[tuple[T, torch.cuda.Event, float]] = deque()
        self._spare: list[torch.cuda.Event] = []
        self._base = self._event()
        self._base.record()
        self._base.synchronize()
        self._base_time = perf_counter()
        self.reached = self._base_time  # the end of the last mark that was read
        self._since_base = 0

    def mark(self, what: T) -> None:
        """Everything issued since the last mark belongs to this one."""
        event = self._event()
        event.record()
        self._pending.append((what, event, perf_counter()))

    def passed(self, *, wait: bool = False) -> Iterator[tuple[T, float, float]]:
        """Marks that the GPU has passed, with their start and end; all of them if `wait`."""
        while self._pending and (wait or self._pending[0][1].query()):
            what, event, issued = self._pending.popleft()
            if wait:
                event.synchronize()
            end = self._base_time + self._base.elapsed_time(event) / 1000
            # The clocks of host and GPU drift apart. The GPU passes a mark after it is issued and before it is read.
            right = min(max(end, issued), perf_counter())
            self._base_time += right - end
            start, self.reached = self.reached, max(self.reached, right)
            self._since_base += 1
            if self._since_base >= REBASE:
                self._spare.append(self._base)
                self._base, self._base_time, self._since_base = event, right, 0
            else:
                self._spare.append(event)
            yield what, start, self.reached

    def _event(self) -> torch.cuda.Event:
        return self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
