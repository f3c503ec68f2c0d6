"""Plans for stages that are played from CUDA graphs, which need more memory than the search counts.

The search counts what lies there at each moment; on tape nothing is given back (`simulate/cuda_graphs.py`). What a plan
needs more is told by its simulation, and the next one has to do with so much less.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from vpipe.cost import SWAP
from vpipe.plan.model import StageMemory
from vpipe.plan.result import PlanResult
from vpipe.plan.task import Task
from vpipe.simulate import simulate
from vpipe.simulate.memory import RankMemory

TRIES = 12
NEVER = 1e6
"""Seconds that swapping would take: a stage that swaps is on no tape."""


def plan_taped(task: Task, find: Callable[[Task], PlanResult | None]) -> PlanResult | None:
    """What `find` finds within so much memory that the plan fits on tape; None if none was found."""
    blocks = tuple(replace(block, swapping=NEVER) for block in task.profile.blocks)
    issued = replace(task.profile, blocks=blocks, device=replace(task.profile.device, graphs=False))
    searched = task._replace(profile=issued)
    for _ in range(TRIES):
        found = find(searched)
        if found is None or SWAP in found.policies:
            return None
        told = _with_memory(task, found)
        over = [position.memory.total - task.memory for position in told.positions]
        if max(over) <= 0:
            return told
        worst = found.positions[over.index(max(over))]
        smaller = min(searched.memory, worst.memory.total) - max(over)
        if smaller < 1:
            return None
        searched = searched._replace(memory=smaller)
    return None


def _with_memory(task: Task, result: PlanResult) -> PlanResult:
    table = result.kind.table
    few = None if table else result.minibatches or 4 * result.ranks
    ranks = simulate(task.profile, result.to_plan(), table, few).ranks
    positions = tuple(
        replace(position, memory=_as_planned(ranks[position.ranks[0]].memory))
        for position in result.positions
    )
    return replace(result, positions=positions)


def _as_planned(held: RankMemory) -> StageMemory:
    weights = held.weights + held.versions + held.gradients + held.optimizer
    return StageMemory(weights, held.activations, 0, held.buffers)
