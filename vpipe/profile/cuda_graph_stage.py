"""A measured stage whose rounds replay CUDA graphs, as the stages of a run with `cuda_graphs` do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vpipe.profile.measured_stage import Interval, MeasuredStage
from vpipe.stage import StageModule
from vpipe.stage.graph_pool import GraphPool, GraphSlot
from vpipe.stage.swap import Swap


class MeasuredGraphStage(MeasuredStage):
    """Swapping modules run eagerly, and so does everything before the rounds, when bytes are measured."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._begun = False
        self._tapes: dict[StageModule, GraphPool] = {}
        self._played: tuple[GraphPool, GraphSlot] | None = None

    def begin_rounds(self) -> None:
        self._begun = True

    def forward(self, module: StageModule, swap: Swap | None = None) -> Interval:
        if self._played:
            tapes, seat = self._played
            tapes.finished(seat)
            self._played = None
        if not self._begun or swap is not None:
            return super().forward(module, swap)
        if module not in self._tapes:
            self._tapes[module] = self._warm_tapes(module)
        tapes = self._tapes[module]
        start = self.clock()
        found = tapes.seat(self.inputs, self.fields)
        assert found is not None
        found.forward(0)
        self._played = tapes, found
        return start, self.clock()

    def backward(self) -> Interval:
        if self._played is None:
            return super().backward()
        tapes, seat = self._played
        for name, tensor in seat.place.gradients.items():
            if name not in self._gradients:
                self._gradients[name] = torch.ones_like(tensor)
        start = self.clock()
        tapes.gather_gradients()
        seat.backward(0, self._gradients, 1.0)
        return start, self.clock()

    def weight_gradients(self) -> Interval:
        if self._played is None:
            return super().weight_gradients()
        start = self.clock()
        self._played[1].weight_gradients()
        return start, self.clock()

    def static_gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.weights.model_parameters if parameter.grad is not None]

    def _warm_tapes(self, module: StageModule) -> GraphPool:
        """With one recorded already, so that the first lap is like the others."""
        tapes = GraphPool(module, self.weights, 0)
        super().forward(module)
        super().backward()
        super().weight_gradients()
        tapes.finished(None)
        self.weights.skip()
        tapes.finished(tapes.seat(self.inputs, self.fields))
        return tapes
