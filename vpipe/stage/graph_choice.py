"""Whether replaying a stage gains anything: the host's time to launch a minibatch against the device's to compute it.

the host is faster     host    ▪▪▪▪▪           its time is a small share of the device's: graphs gain nothing
                       device   ▪▪▪▪▪▪▪▪▪▪▪▪
the device is faster   host    ▪▪▪▪▪▪▪▪▪▪▪▪    the device waits for each kernel: a graph launches all of them at once
                       device   ▪ ▪ ▪ ▪ ▪ ▪ ▪
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter

import torch

GAINS = 0.8
"""Share of the device's time from which on the host counts as the slower one: there are pauses between kernels."""


class LaunchTimes:
    """The times of one minibatch that is run eagerly; each of its parts begins with an idle stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def timing(self) -> Iterator[None]:
        # Else the host may wait for room in the queue. Not the device: ranks that are threads may capture graphs on it.
        torch.cuda.current_stream(self._device).synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        began = perf_counter()
        yield
        self._host += perf_counter() - began
        end.record()
        self._events.append((start, end))

    def host_is_slower(self) -> bool:
        self._events[-1][1].synchronize()
        return self._host > GAINS * sum(start.elapsed_time(end) / 1000 for start, end in self._events)


def timed(times: LaunchTimes | None) -> AbstractContextManager[None]:
    return nullcontext() if times is None else times.timing()
