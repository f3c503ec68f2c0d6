"""What one rank's actions took: time and bytes."""

from dataclasses import dataclass, field
from time import perf_counter


@dataclass
class RuntimeStats:
    """Seconds spent computing and waiting for tensors, and bytes moved, in one direction."""

    compute: float = 0.0
    wait: float = 0.0
    send: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    actions: int = 0


@dataclass
class Clock:
    """Adds the time since it was last read to one of the figures."""

    now: float = field(default_factory=perf_counter)

    def lap(self) -> float:
        before, self.now = self.now, perf_counter()
        return self.now - before
