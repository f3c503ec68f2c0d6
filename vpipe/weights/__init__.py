"""The weights of a stage: versions, the stashing optimizer, base optimizers and learning-rate policies by name."""

from vpipe.weights.named_optimizers import name_of, optimizer_factory
from vpipe.weights.optimizer_state import Changes
from vpipe.weights.optimizers import NamedParameters, OptimizerFactory, optimizer_groups
from vpipe.weights.policies import learning_rate_policy
from vpipe.weights.prediction import Delay
from vpipe.weights.stashing import NO_DELAY, OptimizerWithWeightStashing, SchedulerFactory

__all__ = [
    "NO_DELAY",
    "Changes",
    "Delay",
    "NamedParameters",
    "OptimizerFactory",
    "OptimizerWithWeightStashing",
    "SchedulerFactory",
    "learning_rate_policy",
    "name_of",
    "optimizer_factory",
    "optimizer_groups",
]
