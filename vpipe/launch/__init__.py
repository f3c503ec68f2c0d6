"""The processes of a run: started, watched and ended together."""

from vpipe.launch.rank import ASKED, LAUNCHED

__all__ = ["ASKED", "LAUNCHED"]
