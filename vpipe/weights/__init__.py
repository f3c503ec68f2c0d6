"""The weights of a stage: versions, the stashing optimizer, base optimizers by name."""

from vpipe.weights.optimizers import optimizer_factory
from vpipe.weights.stashing import OptimizerFactory, OptimizerWithWeightStashing, SchedulerFactory

__all__ = ["OptimizerFactory", "OptimizerWithWeightStashing", "SchedulerFactory", "optimizer_factory"]
