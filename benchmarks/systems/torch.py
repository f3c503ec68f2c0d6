"""torch.distributed.pipelining, its stages cut by hand between whole layers as its users do.

The embedding goes with the first stage and the head with the last. Forward and backward of a minibatch take
about 80 ms for a layer, 65 ms for the head with its loss and 2 ms for the embedding, so the best cut between
whole layers gives every stage equally many: 322 ms against 385 ms for two stages (5 and 3 layers: 402 ms
against 305 ms).
"""

from __future__ import annotations

import itertools

import torch
import work
from torch import Tensor, nn
from torch.distributed import pipelining

from systems import Runner, Schedule, System

SINGLE = {"GPipe": pipelining.ScheduleGPipe, "1F1B": pipelining.Schedule1F1B}  # one stage a rank
LOOP = {  # two stages a rank: 0 and 2, 1 and 3
    "Interleaved1F1B": pipelining.ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": pipelining.ScheduleInterleavedZeroBubble,
}
V = {  # two stages a rank: 0 and 3, 1 and 2
    "ZBVZeroBubble": pipelining.ScheduleZBVZeroBubble,
    "DualPipeV": pipelining.ScheduleDualPipeV,
}


class TorchPipelining(System):
    schedules = tuple(Schedule(name) for name in (*SINGLE, *LOOP, *V))

    def build(self, rank: int, world: int, minibatches: int, schedule: str) -> Runner:
        count = world if schedule in SINGLE else 2 * world
        stages = {
            index: pipelining.PipelineStage(module, index, count, torch.device("cpu"))
            for index, module in enumerate(stage_modules(count))
            if rank_of(index, world, in_v=schedule in V) == rank
        }
        held = list(stages.values())
        kind = (SINGLE | LOOP | V)[schedule]
        program = kind(held[0] if schedule in SINGLE else held, n_microbatches=minibatches, loss_fn=work.loss)
        optimizer = work.build_optimizer(p for stage in held for p in stage.submod.parameters())
        ids, labels = (torch.cat(parts) for parts in zip(*work.batches(minibatches), strict=True))
        return TorchRunner(
            program, optimizer, ids if 0 in stages else None, labels if count - 1 in stages else None
        )


class TorchRunner(Runner):
    def __init__(self, program, optimizer: torch.optim.Optimizer, ids: Tensor | None, labels: Tensor | None):
        self.program = program
        self.optimizer = optimizer
        self.arguments = () if ids is None else (ids,)
        self.labels = labels

    def step(self) -> float:
        losses: list[Tensor] = []
        self.program.step(*self.arguments, target=self.labels, losses=losses, return_outputs=False)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).mean().item() if losses else 0.0


def stage_modules(count: int) -> list[nn.Module]:
    """The model's pieces as one module a stage, each with equally many layers."""
    pieces = work.build_model().pieces()
    layers = work.LAYERS // count
    ends = [0, *range(1 + layers, 1 + work.LAYERS, layers), len(pieces)]
    return [nn.Sequential(*pieces[start:end]) for start, end in itertools.pairwise(ends)]


def rank_of(stage: int, world: int, in_v: bool) -> int:
    """The rank that holds a stage: round and round, or down and up again."""
    turn, place = divmod(stage, world)
    return world - 1 - place if in_v and turn % 2 else place


SYSTEM = TorchPipelining()
