"""Random numbers of a block, which depend on the run's seed, the block and the minibatch alone."""

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
    """State of one minibatch on its way through a stage: random seed, deferred weight gradients, memory.

    Any partition, schedule and recomputation draws the same dropout masks, because each block seeds the generators
    from (seed, block, minibatch). `deferred` collects the weight-gradient work of a stage with `split=True`; each item,
    called once, adds to `parameter.grad`. `swap` takes what swapped blocks save (None: they keep it); `held` counts
    the bytes that autograd holds, if given.
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
