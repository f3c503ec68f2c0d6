"""Plans: partition, memory policy, replicas and schedule under a memory cap. Knows no torch."""

from vpipe.plan.planner import plan
from vpipe.plan.result import PlanResult
from vpipe.system.callable_module import make_callable

__all__ = ["PlanResult", "plan"]

make_callable(__name__)
