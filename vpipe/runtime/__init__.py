"""The runtime of one rank: the interpreter of its program, its data feed, its updates."""

from vpipe.runtime.feed import Feed, Fields, count_labels, count_samples
from vpipe.runtime.gradients import GradientExchange
from vpipe.runtime.losses import Losses
from vpipe.runtime.stage_runtime import StageRuntime
from vpipe.runtime.updates import Updates

__all__ = [
    "Feed",
    "Fields",
    "GradientExchange",
    "Losses",
    "StageRuntime",
    "Updates",
    "count_labels",
    "count_samples",
]
