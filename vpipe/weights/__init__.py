"""The weights of a stage: versions, the stashing optimizer, base optimizers and learning-rate policies by name."""

from vpipe.weights.optimizers import optimizer_factory
from vpipe.weights.policies import learning_rate_policy
from vpipe.weights.stashing import OptimizerFactory, OptimizerWithWeightStashing, SchedulerFactory

__all__ = [
    "OptimizerFactory",
    "OptimizerWithWeightStashing",
    "SchedulerFactory",
    "learning_rate_policy",
    "optimizer_factory",
]
