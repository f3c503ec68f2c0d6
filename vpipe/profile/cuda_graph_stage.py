"""A measured stage whose rounds replay CUDA graphs, as the stages of a run with `cuda_graphs` do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vpipe.profile.measured_stage import Interval, MeasuredStage
from vpipe.stage import StageModule
from vpipe.stage.graph_pool import GraphPool, GraphSlot
from vpipe.stage.swap import Swap


class MeasuredGraphStage(MeasuredStage):
    """Swapping modules run eagerly, and so does everything before the rounds, when bytes are measured."""

    keeps_gradients = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._begun = False
        # Of a stage one module runs at a time, so that the graphs of all can have the same memory.
        self._memory = torch.cuda.graph_pool_handle(), torch.cuda.graph_pool_handle()

    def _take_minibatch(self, *given: Mapping[str, Tensor]) -> None:
        super()._take_minibatch(*given)
        self._pools: dict[StageModule, GraphPool] = {}
        self._replayed: tuple[GraphPool, GraphSlot] | None = None

    @property
    def lacks_memory(self) -> bool:
        return any(pool.full for pool in self._pools.values())

    def begin_rounds(self) -> None:
        self._begun = True

    def forward(self, module: StageModule, swap: Swap | None = None) -> Interval:
        if self._replayed:
            pool, slot = self._replayed
            pool.finish(slot)
            self._replayed = None
        if not self._begun or swap is not None:
            return super().forward(module, swap)
        if module not in self._pools:
            self._pools[module] = self._warm_pool(module)
        pool = self._pools[module]
        start = self.clock()
        taken = pool.take_slot(self.inputs, self.fields)
        if taken is None:  # there was no memory for its graphs
            return super().forward(module, swap)
        taken.forward(0)
        self._replayed = pool, taken
        return start, self.clock()

    def backward(self) -> Interval:
        if self._replayed is None:
            return super().backward()
        pool, slot = self._replayed
        for name, tensor in slot.memory.gradients.items():
            if name not in self._gradients:
                self._gradients[name] = torch.ones_like(tensor)
        start = self.clock()
        pool.bind_gradients()
        slot.backward(0, self._gradients, 1.0)
        return start, self.clock()

    def weight_gradients(self) -> Interval:
        if self._replayed is None:
            return super().weight_gradients()
        start = self.clock()
        self._replayed[1].weight_gradients()
        return start, self.clock()

    def _warm_pool(self, module: StageModule) -> GraphPool:
        """With graphs captured already, so that the first round is like the others."""
        pool = GraphPool(module, self.weights, 0, memory=self._memory)
        super().forward(module)
        super().backward()
        super().weight_gradients()
        pool.finish(None)
        self.weights.skip()
        pool.finish(pool.take_slot(self.inputs, self.fields))
        return pool
