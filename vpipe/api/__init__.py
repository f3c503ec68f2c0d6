"""What users hold: `vpipe.Pipeline` with a run's folder and checkpoints, a loader that can be resumed, a past run."""

from vpipe.api.loader import Loader
from vpipe.api.run import Run
from vpipe.api.user_pipeline import UserPipeline

__all__ = ["Loader", "Run", "UserPipeline"]
