"""A clock by which an action takes as long as the test says, however busy the machine is."""

import threading
import time

import pytest

from vpipe.communication import handler
from vpipe.runtime import recording, stage_runtime
from vpipe.system import faults

TICK = 0.001
"""Seconds between two looks at the clock: every action takes as long."""


class VirtualClock(threading.local):
    """One for each thread, so for each rank of those that are threads. It stands in for `time` as well."""

    def __init__(self) -> None:
        self._now = time.perf_counter()

    def perf_counter(self) -> float:
        self._now += TICK
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds

    time = staticmethod(time.time)


def measure_virtually(patch: pytest.MonkeyPatch) -> VirtualClock:
    """From now on a runtime measures its actions with this clock, and a fault that sleeps lets it go on."""
    clock = VirtualClock()
    for module in (handler, recording, stage_runtime):
        patch.setattr(module, "perf_counter", clock.perf_counter)
    patch.setattr(faults, "time", clock)
    return clock
