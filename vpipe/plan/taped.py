"""Plans for stages that are played from CUDA graphs, which need more memory than the search counts.

The search counts what lies there at each moment; on tape nothing is given back (`simulate/taped.py`). What a plan
needs more is told by its simulation, and set aside for the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from vpipe.plan.model import Memory
from vpipe.plan.result import PlanResult
from vpipe.plan.task import Task
from vpipe.simulate import simulate
from vpipe.simulate.memory import Memory as Held

TRIES = 12
NEVER = 1e6
"""Seconds that swapping would take: a stage that swaps is on no tape."""


def plan_taped(task: Task, find: Callable[[Task], PlanResult | None]) -> PlanResult | None:
    """What `find` finds within so much memory that the plan fits on tape; None if none was found."""
    aside = 0
    blocks = tuple(replace(block, swapping=NEVER) for block in task.profile.blocks)
    searched = task._replace(profile=replace(task.profile, blocks=blocks))
    for _ in range(TRIES):
        if aside >= task.memory:
            return None
        found = find(searched._replace(memory=task.memory - aside))
        if found is None:
            return None
        told = _with_memory(task, found)
        over = max(position.memory.total for position in told.positions) - task.memory
        if over <= 0:
            return told
        aside += over
    return None


def _with_memory(task: Task, result: PlanResult) -> PlanResult:
    few = result.minibatches or 4 * result.ranks
    ranks = simulate(task.profile, result.to_plan(), None, few).ranks
    positions = tuple(
        replace(position, memory=_as_planned(ranks[position.ranks[0]].memory))
        for position in result.positions
    )
    return replace(result, positions=positions)


def _as_planned(held: Held) -> Memory:
    weights = held.weights + held.versions + held.gradients + held.optimizer
    return Memory(weights, held.activations, 0, held.buffers)
