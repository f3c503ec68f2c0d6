"""One stage: its module, and how it computes, keeps, recomputes, swaps and replays."""

from vpipe.stage.module import StageModule
from vpipe.stage.random import RandomContext
from vpipe.stage.stage import Stage, StageState

__all__ = ["RandomContext", "Stage", "StageModule", "StageState"]
