"""The start of a run's processes."""

from vpipe.launch.rank import ASKED, LAUNCHED
from vpipe.launch.run import gpus_of, launch, run

__all__ = ["ASKED", "LAUNCHED", "gpus_of", "launch", "run"]
