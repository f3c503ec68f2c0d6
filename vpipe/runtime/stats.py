"""The times of one rank's actions."""

from dataclasses import dataclass


@dataclass
class RuntimeStats:
    """Seconds of computing, of waiting for messages and of sending, and the number of actions, in one direction."""

    compute: float = 0.0
    wait: float = 0.0
    send: float = 0.0
    actions: int = 0
