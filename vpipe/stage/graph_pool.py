"""The CUDA graphs of a stage by slot and by address of the weights, captured when they are first needed.

    minibatch   0    1    2     3      4      5
    slot        -    -    a     b      a      b        -: runs eagerly, until the first minibatch has finished
    weights     v0   v0   v1    v2     v0     v1       address of the version that it reads; storage is reused
    graphs                a1*   b2*    a0*    b1*      *: captured, then replayed; later minibatches only replay

A minibatch holds a slot from its forward to the end of its backward. A free slot that has graphs for the current
weights is preferred, so that few graphs are captured. A minibatch of another shape than the first runs eagerly.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from vpipe.errors import VPipeError
from vpipe.stage import StageModule
from vpipe.stage.cuda_graphs import CaptureContext, SlotMemory, StageCudaGraphs, clones
from vpipe.weights import OptimizerWithWeightStashing
from vpipe.weights.versions import flat_tensors

Addresses = tuple[int, ...]
"""Of the storage of one weight version."""


@dataclass(eq=False)
class GraphSlot:
    """Memory of one minibatch in flight, and the graphs captured for it; `current` are those for its weights."""

    memory: SlotMemory
    graphs: dict[Addresses, StageCudaGraphs] = field(default_factory=dict)
    current: StageCudaGraphs = field(init=False)

    def forward(self, minibatch: int) -> dict[str, Tensor]:
        return self.current.forward(minibatch)

    def backward(
        self, minibatch: int, gradients: Mapping[str, Tensor], seed_gradient: float
    ) -> dict[str, Tensor]:
        """Gradients of the inputs by name, given those of the outputs; that of a loss is `seed_gradient`."""
        for name, target in self.memory.gradients.items():
            if name in gradients:
                target.copy_(gradients[name])
            else:
                target.fill_(seed_gradient if name == "loss" else 0.0)
        return self.current.backward(minibatch)

    def weight_gradients(self) -> None:
        self.current.weight_gradients()


class GraphPool:
    """All slots and graphs of one stage on a GPU. `captured` counts the sets of graphs."""

    def __init__(self, module: StageModule, weights: OptimizerWithWeightStashing, seed: int) -> None:
        self._context = CaptureContext(module, seed)
        self._weights = weights
        self._free: list[GraphSlot] = []
        self._shapes: dict[str, tuple[torch.Size, torch.dtype]] | None = None
        self._warm = False
        self._flats, self._gradients = flat_tensors(weights.model_parameters)
        self._bound: list[tuple[nn.Parameter, Tensor]] = []
        """The parameters that get a gradient at all, each with the tensor to which the graphs add it."""
        self.captured = 0

    def bind_gradients(self) -> None:
        """Before each backward, replayed or eager: let `.grad` be the tensors to which the graphs add."""
        if all(parameter.grad is None for parameter, _ in self._bound):
            if self._bound:
                for flat in self._flats:
                    flat.zero_()
        else:
            for parameter, target in self._bound:
                if parameter.grad is None:
                    target.zero_()
                elif parameter.grad.data_ptr() != target.data_ptr():  # of a minibatch before
                    target.copy_(parameter.grad)
        for parameter, target in self._bound:
            parameter.grad = target

    def take_slot(self, inputs: Mapping[str, Tensor], fields: Mapping[str, Tensor]) -> GraphSlot | None:
        """A slot with the minibatch's tensors copied into it; None: run it eagerly."""
        fields = {name: fields[name] for name in self._context.module.stage.fields}
        shapes = {name: (t.shape, t.dtype) for name, t in [*inputs.items(), *fields.items()]}
        if self._shapes is None:
            self._shapes = shapes
        if not self._warm or shapes != self._shapes:
            return None
        version = self._weights.current
        addresses = tuple(flat.data_ptr() for flat in version.flats)
        slot = next((slot for slot in self._free if addresses in slot.graphs), None)
        if slot is not None:
            self._free.remove(slot)
        else:
            slot = self._free.pop() if self._free else self._new_slot(inputs, fields)
            weights = dict(zip(self._weights.names, version.tensors, strict=True))
            slot.graphs[addresses] = self._capture(slot.memory, weights)
        slot.current = slot.graphs[addresses]
        slot.memory.load(inputs, fields)
        return slot

    def finish(self, slot: GraphSlot | None) -> None:
        """The backward of a minibatch is done, in this slot or (None) eagerly.

        After the first one, libraries have allocated their workspaces, and it is known which parameters get gradients:
        those without one keep `.grad` None, so that the optimizer skips them.
        """
        if not self._warm:
            pairs = zip(self._weights.model_parameters, self._gradients, strict=True)
            self._bound = [(parameter, target) for parameter, target in pairs if parameter.grad is not None]
            self._warm = True
        if slot is not None:
            self._free.append(slot)

    def _new_slot(self, inputs: Mapping[str, Tensor], fields: Mapping[str, Tensor]) -> GraphSlot:
        # During a capture no memory can be returned to the device, so unused memory is returned before it.
        gc.collect()
        torch.cuda.empty_cache()
        return GraphSlot(SlotMemory(clones(inputs), clones(fields)))

    def _capture(self, memory: SlotMemory, weights: Mapping[str, Tensor]) -> StageCudaGraphs:
        try:
            gradients = dict(zip(self._weights.names, self._gradients, strict=True))
            graphs = StageCudaGraphs(self._context, memory, weights, gradients)
        except RuntimeError as error:
            if "captur" not in str(error):
                raise
            raise VPipeError(
                f"stage {self._context.module.stage.index} cannot be captured as CUDA graphs: "
                f"{str(error).splitlines()[0]}; leave cuda_graphs out"
            ) from error
        self.captured += 1
        return graphs
