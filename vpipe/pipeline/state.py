"""The state of all stages as one: equal on replicas, each tensor from one rank, gathered where it is needed.

Buffers that training changes, such as a batch norm's statistics, differ between the replicas of a stage, because each
sees every R-th minibatch; weights do not depend on them. They are made equal whenever the model is evaluated or saved:
numbers become the replicas' mean, counters the largest. So a run that is resumed, under any number of replicas,
continues as the run that saved.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vpipe.graph import TensorInfo
from vpipe.graph.materialise import materialise
from vpipe.pipeline.layout import Layout
from vpipe.pipeline.model_state import ModelState
from vpipe.runtime import StageRuntime
from vpipe.stage.stage import StageState

KEYS = 20
"""Each exchange has 2 ** 20 keys for its tensors."""


class WholeState:
    """Every rank has one and calls the same methods in the same order, when the pipeline is empty."""

    def __init__(self, layout: Layout, runtime: StageRuntime, model: nn.Module, seed: int) -> None:
        held = [name for name, *_ in layout.state_entries()]
        self.names = ModelState(model, held, seed, layout.compute_dtype, keep=runtime.rank == 0)
        self.layout = layout
        self.runtime = runtime
        self.rank = runtime.rank
        self.placement = layout.schedule.placement
        self._exchanges = 0
        runtime.handler.register_tensor("state")

    @torch.no_grad()
    def equalise_buffers(self) -> None:
        key = self._first_key()
        for graph in self.layout.stage_graphs:
            ranks = self.placement[graph.index]
            for name in sorted(graph.buffers):
                key += 1
                if len(ranks) > 1 and self.rank in ranks:
                    buffer = self.runtime.stages[graph.index].module.buffers_by_name[name]
                    buffer.copy_(_merged(self._from_replicas(ranks, key, buffer)))
                    self.runtime.handler.release(key)

    def own(self) -> dict[str, Tensor]:
        """The newest weights and buffers of this rank's stages, under the model's own names."""
        state: dict[str, Tensor] = {}
        for stage in self.runtime.stages.values():
            state |= stage.state()
        return state

    def gather(self) -> dict[str, Any] | None:
        """The model's `state_dict` on rank 0; None elsewhere."""
        self.equalise_buffers()
        own, handler, first = self.own(), self.runtime.handler, self._first_key()
        gathered: dict[str, Tensor] = {}
        for key, (name, owner, shape, _) in enumerate(self.layout.state_entries(), start=first):
            dtype = self.names.dtypes[name]
            if name not in self.names.needed:
                continue
            if owner == self.rank == 0:
                gathered[name] = own[name].to("cpu", dtype, copy=True)
            elif owner == self.rank:
                handler.send("state", own[name].to("cpu", dtype), key, 0, host=True)
            elif self.rank == 0:
                received = handler.recv("state", key, owner, shape, dtype, owner=name, host=True)
                gathered[name] = received.clone()
                handler.release(name)
        return self.names.arrange(gathered) if self.rank == 0 else None

    def take_from_first(self, model: nn.Module, seed: int) -> None:
        """Set the weights and buffers of every rank to those of rank 0's model."""
        handler, key = self.runtime.handler, self._first_key()
        for graph in self.layout.stage_graphs:
            names = (*graph.parameters, *graph.buffers)
            others = [rank for rank in self.placement[graph.index] if rank]
            values = materialise(model, names, seed) if self.rank == 0 and others else {}
            for name in names:
                key += 1
                if self.rank == 0:
                    for rank in others:
                        handler.send("state", values[name].cpu(), key, rank, host=True)
                elif self.rank in others:
                    shape, dtype = self._info(name).shape, self.names.dtypes[name]
                    received = handler.recv("state", key, 0, shape, dtype, owner=name, host=True)
                    values[name] = received.clone()
                    handler.release(name)
            if self.rank in others:
                self.runtime.stages[graph.index].load_state(values)

    def _info(self, name: str) -> TensorInfo:
        graph = self.layout.graph
        return graph.parameters.get(name) or graph.buffers[name]

    def for_resuming(self) -> dict[int, StageState]:
        """The state of each stage whose first rank this is; a tensor of several stages is part of the first's."""
        self.equalise_buffers()
        self.runtime.exchange.forget_lost()
        included: set[str] = set()
        stages: dict[int, StageState] = {}
        for graph in self.layout.stage_graphs:
            if self.placement[graph.index][0] == self.rank:
                stages[graph.index] = self.runtime.stages[graph.index].training_state(included)
            included.update(graph.parameters, graph.buffers)
        return stages

    def _from_replicas(self, ranks: Sequence[int], key: int, own: Tensor) -> list[Tensor]:
        """A buffer's values on all replicas, in the same order everywhere."""
        handler, others = self.runtime.handler, [rank for rank in ranks if rank != self.rank]
        here = own.to("cpu", copy=True)
        for rank in others:
            handler.send("state", here, key, rank, host=True)
        received = {
            rank: handler.recv("state", key, rank, own.shape, own.dtype, owner=key, host=True)
            for rank in others
        }
        return [received.get(rank, here) for rank in ranks]

    def _first_key(self) -> int:
        self._exchanges += 1
        return self._exchanges << KEYS


def _merged(values: Sequence[Tensor]) -> Tensor:
    first = values[0]
    if all(torch.equal(first, other) for other in values[1:]):
        return first.clone()
    stacked = torch.stack(list(values))
    return stacked.double().mean(0) if first.is_floating_point() else stacked.amax(0)
