"""Randomness of a block: a function of the run's seed, the block and the minibatch, and of nothing else."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from vpipe.graph.materialise import stable_seed
from vpipe.stage.held import Held
from vpipe.stage.swap import Swap


@dataclass
class RandomContext:
    """What one minibatch carries through a stage: its random seed, its postponed weight gradients, its memory.

    Any partition, any schedule and any recomputation draws the same dropout masks, because each block sets the
    generators anew from (seed, block, minibatch). `deferred` collects the weight-gradient work of a stage that
    was built with `split=True`; each item, called once, adds to `parameter.grad`. `swap` takes what blocks that
    are swapped save (without one they keep it); `held` counts what autograd holds, if given.
    """

    seed: int = 0
    minibatch: int = 0
    deferred: list[partial[None]] = field(default_factory=list)
    swap: Swap | None = None
    held: Held | None = None

    def seed_block(self, block: int, device: torch.device) -> None:
        seed = stable_seed(self.seed, block, self.minibatch)
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            torch.cuda.default_generators[index].manual_seed(seed)

    def temporary_memory(self) -> AbstractContextManager[None]:
        """Around the forward of a recomputed block: only its outputs are needed afterwards.

        A hook for CUDA graphs, as is `keep_outputs`: their memory is fixed at capture.
        """
        return nullcontext()

    def keep_outputs(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return outputs
