"""The memory that a rank holds now, cheaply: of its process, or of its GPU what the allocator has handed out."""

from __future__ import annotations

import os
import resource
import sys
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from vpipe.runtime import StageRuntime

PAGE = resource.getpagesize()


class Gauge(Protocol):
    of: str
    """What it tells of: process or device."""

    def read(self) -> int: ...

    def close(self) -> None: ...


def gauge_for(runtime: StageRuntime) -> Gauge:
    """By where the rank's parameters lie."""
    for stage in runtime.stages.values():
        for parameter in stage.module.parameters_by_name.values():
            if parameter.device.type == "cuda":
                return DeviceGauge(parameter.device)
    return ProcessGauge()


class DeviceGauge:
    of = "device"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def close(self) -> None:
        """Nothing is held open."""


class ProcessGauge:
    """How many bytes of the process lie in memory, libraries included: one system call.

    Where Linux's /proc is missing, it is the most that the process ever held.
    """

    of = "process"

    def __init__(self) -> None:
        try:
            self._file = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = -1

    def read(self) -> int:
        if self._file < 0:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return peak if sys.platform == "darwin" else peak * 1024
        return int(os.pread(self._file, 128, 0).split()[1]) * PAGE

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
