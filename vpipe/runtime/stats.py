"""What one rank's actions took: time and bytes."""

from dataclasses import dataclass


@dataclass
class RuntimeStats:
    """Seconds spent computing and waiting for tensors, and bytes moved, in one direction."""

    compute: float = 0.0
    wait: float = 0.0
    send: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    actions: int = 0
