"""The CUDA graphs of a stage by slot and by address of the weights, captured when they are first needed.

    minibatch   0    1    2     3      4      5
    slot        -    -    a     b      a      b        -: runs eagerly, until the first minibatch has finished
    weights     v0   v0   v1    v2     v0     v1       address of the version that it reads; storage is reused
    graphs                a1*   b2*    a0*    b1*      *: captured, then replayed; later minibatches only replay

A minibatch holds a slot from its forward to the end of its backward. A free slot that has graphs for the current
weights is preferred, so that few graphs are captured. A minibatch of another shape than the first runs eagerly, and so
do all that would need further graphs where there is no memory for them.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from vpipe.errors import VPipeError
from vpipe.stage import StageModule
from vpipe.stage.cuda_graphs import CaptureContext, Pool, SlotMemory, StageCudaGraphs, clones
from vpipe.stage.graph_choice import LaunchTimes
from vpipe.system.console import inform
from vpipe.system.device_memory import available_memory, peak_memory, used_memory
from vpipe.weights import OptimizerWithWeightStashing
from vpipe.weights.versions import flat_tensors

Addresses = tuple[int, ...]
"""Of the storage of one weight version."""
NO_MEMORY = "there is no memory for more of them"


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

    def __init__(
        self,
        module: StageModule,
        weights: OptimizerWithWeightStashing,
        seed: int,
        *,
        auto: bool = False,
        memory: tuple[Pool, Pool] | None = None,
    ) -> None:
        """`auto`: only if they gain, and what cannot be captured runs eagerly. `memory`: of the stage and of a slot,
        shared with other stages of which no two are ever at work; by default the stage's and the slot's own."""
        self._context = CaptureContext(module, seed, None if memory is None else memory[0])
        self._slot_memory = None if memory is None else memory[1]
        self._auto = auto
        self._gains: bool | None = None if auto else True
        self._timed: LaunchTimes | None = None
        self._set_bytes = 0
        """Of the largest set of graphs so far."""
        self.full = False
        """Whether no further graphs are captured."""
        self._weights = weights
        self._free: list[GraphSlot] = []
        self._shapes: dict[str, tuple[torch.Size, torch.dtype]] | None = None
        self._warm = False
        self._flats: Sequence[Tensor] = ()
        self._gradients: Sequence[Tensor] = ()
        self._bound: list[tuple[nn.Parameter, Tensor]] = []
        """The parameters that get a gradient at all, each with the tensor to which the graphs add it."""
        self._without_gradient: set[nn.Parameter] = set()
        if not auto:
            self._flats, self._gradients = flat_tensors(weights.model_parameters)
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
        if not self._warm or not self._gains or shapes != self._shapes:
            return None
        version = self._weights.current
        addresses = tuple(flat.data_ptr() for flat in version.flats)
        slot = next((slot for slot in self._free if addresses in slot.graphs), None)
        if slot is not None:
            self._free.remove(slot)
        else:
            slot = self._with_graphs(inputs, fields, addresses)
            if slot is None:
                return None
        slot.current = slot.graphs[addresses]
        slot.memory.load(inputs, fields)
        return slot

    def launch_times(self) -> LaunchTimes | None:
        """For a minibatch that runs eagerly: what times it, if it is the one that decides whether graphs gain."""
        if not self._warm or self._gains is not None or self._timed is not None:
            return None
        self._timed = LaunchTimes(self._context.device)
        return self._timed

    def finish(self, slot: GraphSlot | None, times: LaunchTimes | None = None) -> None:
        """The backward of a minibatch is done, in this slot or (None) eagerly, with these times if it was timed.

        After the first one, libraries have allocated their workspaces, and it is known which parameters get gradients:
        those without one keep `.grad` None, so that the optimizer skips them.
        """
        if not self._warm:
            self._without_gradient = {p for p in self._weights.model_parameters if p.grad is None}
            self._warm = True
            if self._gains:
                self._bind()
        if times is not None:
            self._gains = times.host_is_slower()
            if self._gains:
                self._flats, self._gradients = flat_tensors(self._weights.model_parameters)
                self._bind()
        if slot is not None:
            self._free.append(slot)

    def _bind(self) -> None:
        pairs = zip(self._weights.model_parameters, self._gradients, strict=True)
        self._bound = [(p, target) for p, target in pairs if p not in self._without_gradient]

    def _with_graphs(
        self, inputs: Mapping[str, Tensor], fields: Mapping[str, Tensor], addresses: Addresses
    ) -> GraphSlot | None:
        """A slot with new graphs for the current weights; None if there is no memory for them."""
        if self.full:
            return None
        if not self._free:
            # During a capture no memory can be returned to the device, so unused memory is returned before it.
            gc.collect()
            torch.cuda.empty_cache()
        free, needed = self._room()
        if free - self._set_bytes < needed:
            self._stop_capturing(NO_MEMORY)
            return None
        reason = ""
        slot = self._free.pop() if self._free else None
        try:
            slot = slot or GraphSlot(self._new_memory(inputs, fields))
            slot.graphs[addresses] = self._capture(slot.memory)
        except RuntimeError as error:
            reason = self._reason(error)
        left, _ = self._room()
        if not reason and left < needed:
            assert slot is not None
            del slot.graphs[addresses]
            reason = NO_MEMORY
        if reason:  # the error is gone, and with it what it holds
            self._stop_capturing(reason)
            if slot is not None and slot.graphs:
                self._free.append(slot)
            return None
        self.captured += 1
        self._set_bytes = max(self._set_bytes, free - left)  # 0 without auto
        return slot

    def _room(self) -> tuple[int, int]:
        """With `auto` the bytes that are left, and those of them that training needs at its peak."""
        if not self._auto:
            return 0, 0
        device = self._context.device
        return available_memory(device), peak_memory(device) - used_memory(device)

    def _new_memory(self, inputs: Mapping[str, Tensor], fields: Mapping[str, Tensor]) -> SlotMemory:
        memory = SlotMemory(clones(inputs), clones(fields))
        if self._slot_memory is not None:
            memory.pool = self._slot_memory
        return memory

    def _capture(self, memory: SlotMemory) -> StageCudaGraphs:
        names, version = self._weights.names, self._weights.current
        weights, gradients = (
            dict(zip(names, tensors, strict=True)) for tensors in (version.tensors, self._gradients)
        )
        return StageCudaGraphs(self._context, memory, weights, gradients)

    def _reason(self, error: RuntimeError) -> str:
        """Why minibatches run eagerly from now on; raises if that is not an answer to the error."""
        first = str(error).partition("\n")[0]
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in first:
            return NO_MEMORY
        if "captur" not in str(error):
            raise error
        if not self._auto:
            raise VPipeError(
                f"stage {self._context.module.stage.index} cannot be captured as CUDA graphs: {first}; "
                "leave cuda_graphs out"
            ) from error
        return f"it cannot be captured: {first}"

    def _stop_capturing(self, reason: str) -> None:
        self.full = True
        if not self.captured:  # then gradients need no fixed memory
            self._gains, self._flats, self._gradients, self._bound = False, (), (), []
        gc.collect()
        torch.cuda.empty_cache()
        kept = f"{self.captured} sets are replayed, other minibatches" if self.captured else "all minibatches"
        inform(f"stage {self._context.module.stage.index}, CUDA graphs: {reason}; {kept} run eagerly")
