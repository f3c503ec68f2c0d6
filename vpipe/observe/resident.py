"""The memory that this process holds now, cheaply: two system calls on Linux, no allocation statistics."""

from __future__ import annotations

import os
import resource
import sys

PAGE = resource.getpagesize()


class Gauge:
    """Reads how many bytes of the process lie in memory, libraries included.

    Where Linux's /proc is missing, it is the most that the process ever held.
    """

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
