"""The state of all stages as one: what several ranks hold is made equal, told once, and gathered."""

from torch import Tensor

from vpipe.communication import HOST
from vpipe.pipeline.layout import Layout
from vpipe.runtime import StageRuntime
from vpipe.runtime.replica_buffers import equalise
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

    def equalise_buffers(self) -> None:
        """Replicas that saw different minibatches have different statistics: from here on the same."""
        stages = self.runtime.stages
        equalise(self.runtime.handler, self.placement, self.layout.stage_graphs, stages, self._first_key())

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
                handler.send("state", own[name].to("cpu", dtype), key, 0)
            elif self.rank == 0:
                received = handler.recv("state", key, owner, shape, dtype, owner=name, device=HOST)
                gathered[name] = received.clone()
                handler.release(name)
        return gathered if self.rank == 0 else None

    def for_resuming(self) -> dict[int, StageState]:
        """Of each stage that this rank answers for: the first of a stage's ranks tells it.

        What several stages hold is told by the first of them.
        """
        self.equalise_buffers()
        told: set[str] = set()
        stages: dict[int, StageState] = {}
        for graph in self.layout.stage_graphs:
            if self.placement[graph.index][0] == self.rank:
                stages[graph.index] = self.runtime.stages[graph.index].training_state(told)
            told.update(graph.parameters, graph.buffers)
        return stages

    def _first_key(self) -> int:
        self._exchanges += 1
        return self._exchanges << KEYS
