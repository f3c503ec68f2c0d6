"""What one rank runs: the interpreter of its program, its stages, its updates."""

from vpipe.graph.held import Held
from vpipe.runtime.feed import Feed, Fields, count_labels, count_samples
from vpipe.runtime.gradients import GradientExchange
from vpipe.runtime.losses import Losses
from vpipe.runtime.precision import LossScale
from vpipe.runtime.stage import Stage
from vpipe.runtime.stage_runtime import StageRuntime
from vpipe.runtime.stats import RuntimeStats
from vpipe.runtime.updates import Updates

__all__ = [
    "Feed",
    "Fields",
    "GradientExchange",
    "Held",
    "LossScale",
    "Losses",
    "RuntimeStats",
    "Stage",
    "StageRuntime",
    "Updates",
    "count_labels",
    "count_samples",
]
