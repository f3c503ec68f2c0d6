"""A limit on waiting that does not count the time for which this process itself was stopped.

When a machine or a job is suspended (SIGSTOP of all its processes, a laptop's lid), every limit would be over when it
goes on, and each rank would blame the one that it waits for. So time is counted in short slices: a slice that took much
longer than it should is one in which this process did not run.
"""

import time

SLICE = 1.0
"""Seconds after which whoever waits must ask again how much is left."""
LONGEST = 3 * SLICE
"""Seconds that are counted between two questions at most; more than SLICE, since a machine may be busy."""


class Deadline:
    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._asked = time.monotonic()

    def left(self) -> float:
        """Seconds that are left, 0 when the limit is reached."""
        now = time.monotonic()
        self._left -= min(now - self._asked, LONGEST)
        self._asked = now
        return max(0.0, self._left)

    def slice(self) -> float:
        """Seconds to wait now, at most; then ask again. 0 when the limit is reached."""
        return min(self.left(), SLICE)
