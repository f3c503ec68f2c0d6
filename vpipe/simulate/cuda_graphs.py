"""The memory of a rank whose stages are played from CUDA graphs (`stage/cuda_graphs.py`): it is taken once and stays.

    places     for each minibatch in flight what its forward needs and saves, its outputs, gradients that come and go
    shared     what a backward needs beyond that, once for a stage; where weight gradients wait for it, in each place
    gradients  where the tapes add them up, always
    versions   as many as are ever live
    update     what the largest of its stages needs
    buffers    once more what libraries hold, for the stream on which tapes are recorded, and a copy of gradients that
               are exchanged, since the next ones are added up in their place

Nothing of it is given back for something else meanwhile, so there is no moment to look for.
"""

from __future__ import annotations

from collections.abc import Mapping

from vpipe.cost import DeviceCost
from vpipe.simulate.memory import RankMemory, Totals
from vpipe.simulate.stage_cost import StageCost


def taped_memory(
    fixed: RankMemory, costs: Mapping[int, StageCost], found: Totals, device: DeviceCost, split: bool
) -> RankMemory:
    activations = versions = updating = 0
    buffers = fixed.buffers + device.workspace
    for stage, cost in costs.items():
        place = cost.held + 2 * cost.sent + cost.received + device.slack
        place += max(cost.passing, cost.input_backward if split else 0)
        buffers += cost.exchanged
        activations += found.in_flight[stage] * place + (0 if split else cost.whole_backward)
        versions += (found.live[stage] - 1) * cost.parameters
        updating = max(updating, cost.updating)
    gradients = fixed.gradients + updating
    return fixed._replace(activations=activations, gradients=gradients, versions=versions, buffers=buffers)
