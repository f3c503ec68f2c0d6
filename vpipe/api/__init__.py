"""What users hold: `vpipe.Pipeline` with a run's folder and checkpoints, and a loader that can be resumed."""

from vpipe.api.loader import Loader
from vpipe.api.user_pipeline import UserPipeline

__all__ = ["Loader", "UserPipeline"]
