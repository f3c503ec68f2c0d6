"""The memory of a rank whose stages are played from CUDA graphs (`graph/tape.py`): it is taken once and stays.

    places     for each minibatch in flight what its forward saves, its outputs, and the gradients that come and go
    shared     what a backward needs beyond that, once for a stage; where weight gradients wait for it, in each place
    gradients  where the tapes add them up, always
    versions   as many as are ever live
    update     what the largest of its stages needs
    workspace  what libraries hold, once more: for the stream on which tapes are recorded

Nothing of it is given back for something else meanwhile, so there is no moment to look for.
"""

from __future__ import annotations

from collections.abc import Mapping

from vpipe.simulate.memory import Memory, Totals
from vpipe.simulate.stage_cost import StageCost


def taped_memory(
    fixed: Memory, costs: Mapping[int, StageCost], found: Totals, workspace: int, split: bool
) -> Memory:
    activations = versions = updating = 0
    for stage, cost in costs.items():
        place = cost.held + 2 * cost.sent + cost.received + (cost.input_backward if split else 0)
        activations += found.in_flight[stage] * place + (0 if split else cost.whole_backward)
        versions += (found.live[stage] - 1) * cost.parameters
        updating = max(updating, cost.updating)
    gradients, buffers = fixed.gradients + updating, fixed.buffers + workspace
    return fixed._replace(activations=activations, gradients=gradients, versions=versions, buffers=buffers)
