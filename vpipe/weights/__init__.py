"""The weights of a stage: versions, the stashing optimizer, base optimizers and learning-rate policies by name."""

from vpipe.weights.optimizer_state import Changes
from vpipe.weights.optimizers import NamedParameters, OptimizerFactory, optimizer_factory, optimizer_groups
from vpipe.weights.policies import learning_rate_policy
from vpipe.weights.stashing import OptimizerWithWeightStashing, SchedulerFactory

__all__ = [
    "Changes",
    "NamedParameters",
    "OptimizerFactory",
    "OptimizerWithWeightStashing",
    "SchedulerFactory",
    "learning_rate_policy",
    "optimizer_factory",
    "optimizer_groups",
]
