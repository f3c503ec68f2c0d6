"""The start of a run's processes."""

from vpipe.launch.local import LAUNCHED, PEER_FAILED
from vpipe.launch.run import launch, run

__all__ = ["LAUNCHED", "PEER_FAILED", "launch", "run"]
