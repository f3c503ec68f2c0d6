"""Plans: partition, memory policy, replicas and schedule under a memory cap. Knows no torch."""

from vpipe.plan.planner import plan
from vpipe.plan.result import PlanResult

__all__ = ["PlanResult", "plan"]
