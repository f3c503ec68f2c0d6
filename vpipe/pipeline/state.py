"""The state of all stages as one: equal on replicas, each tensor from one rank, gathered where it is needed.

Buffers that training changes, such as a batch norm's statistics, differ between the replicas of a stage, because each
sees every R-th minibatch; weights do not depend on them. They are made equal whenever the model is evaluated or saved:
numbers become the replicas' mean, counters the largest. So a run that is resumed, under any number of replicas,
continues as the run that saved.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from vpipe.pipeline.layout import Layout
from vpipe.runtime import StageRuntime
from vpipe.stage.stage import StageState

KEYS = 20
"""Each exchange has 2 ** 20 keys for its tensors."""


class WholeState:
    """Every rank has one and calls the same methods in the same order, when the pipeline is empty."""

    def __init__(self, layout: Layout, runtime: StageRuntime) -> None:
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

    def gather(self) -> dict[str, Tensor] | None:
        """The whole model's weights and buffers on rank 0; None elsewhere."""
        self.equalise_buffers()
        own, handler, first = self.own(), self.runtime.handler, self._first_key()
        gathered: dict[str, Tensor] = {}
        for key, (name, owner, shape, dtype) in enumerate(self.layout.state_entries(), start=first):
            if owner == self.rank == 0:
                gathered[name] = own[name].to("cpu", dtype, copy=True)
            elif owner == self.rank:
                handler.send("state", own[name].to("cpu", dtype), key, 0, host=True)
            elif self.rank == 0:
                received = handler.recv("state", key, owner, shape, dtype, owner=name, host=True)
                gathered[name] = received.clone()
                handler.release(name)
        return gathered if self.rank == 0 else None

    def for_resuming(self) -> dict[int, StageState]:
        """The state of each stage whose first rank this is; a tensor of several stages is part of the first's."""
        self.equalise_buffers()
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
