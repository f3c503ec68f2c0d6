"""A stage to be measured: forward, backward and update of its blocks, timed apart, and the bytes that they need."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from copy import copy
from time import perf_counter, thread_time
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from vpipe.communication import HOST
from vpipe.cost import RECOMPUTE
from vpipe.graph import StageGraph
from vpipe.stage import RandomContext, StageModule
from vpipe.stage.held import address
from vpipe.stage.precision import cast_module
from vpipe.stage.split import waiting_tensors
from vpipe.stage.swap import Swap
from vpipe.weights import Delay, OptimizerFactory, OptimizerWithWeightStashing

Mark: TypeAlias = "float | torch.cuda.Event"
Interval: TypeAlias = tuple[Mark, Mark]
"""The beginning and the end of some work."""


def clock_of(device: torch.device) -> Callable[[], Mark]:
    """The GPU's clock, read only when all is done; or that of the processor."""
    if device.type == "cuda":
        return _event
    # The thread's processor time, which other processes do not lengthen; the wall's where work has more threads.
    return thread_time if torch.get_num_threads() == 1 else perf_counter


def seconds(interval: Interval) -> float:
    start, end = interval
    if isinstance(start, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        end.synchronize()
        return start.elapsed_time(end) / 1000
    assert isinstance(end, float)
    return end - start


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class MeasuredStage:
    """A stage with fixed inputs. Values that it computes from the batch alone are computed once, and not timed."""

    keeps_gradients = False
    """Whether an update leaves the memory of gradients allocated."""

    @property
    def lacks_memory(self) -> bool:
        """Whether CUDA graphs were requested and found none."""
        return False

    def __init__(
        self,
        stage: StageGraph,
        model: nn.Module,
        optimizer: OptimizerFactory,
        dtype: torch.dtype | None,
        values: Mapping[str, Tensor],
        fields: Mapping[str, Tensor],
        device: torch.device = HOST,
        compile: str | None = None,
        predict: bool = False,
    ) -> None:
        self.stage = stage
        self.device = device
        self.compile = compile
        self.whole = StageModule(stage, model, device=device, compile=compile)
        originals = cast_module(self.whole, dtype)
        self.split = StageModule(stage, self.whole, split=True, compile=compile)
        recomputed = dict.fromkeys(stage.blocks, RECOMPUTE)
        self.recomputing = StageModule(stage, self.whole, policies=recomputed, compile=compile)
        self.split_recomputing = StageModule(
            stage, self.whole, split=True, policies=recomputed, compile=compile
        )
        self.weights = OptimizerWithWeightStashing(
            self.whole.parameters_by_name, optimizer, master_values=originals, predict=predict
        )
        self.clock = clock_of(device)
        self._take_minibatch(values, fields)

    def with_minibatch(self, values: Mapping[str, Tensor], fields: Mapping[str, Tensor]) -> MeasuredStage:
        """A stage with the same modules and weights, and inputs and times of its own."""
        other = copy(self)
        other._take_minibatch(values, fields)
        return other

    def _take_minibatch(self, values: Mapping[str, Tensor], fields: Mapping[str, Tensor]) -> None:
        self.fields = {name: fields[name] for name in self.stage.fields}
        self.inputs = {name: values[name] for name in self.stage.reads}
        self.free = self.whole.free_values(self.fields, RandomContext())
        self.intervals: dict[str, list[Interval]] = defaultdict(list)
        self._outputs: dict[str, Tensor] = {}
        self._gradients: dict[str, Tensor] = {}
        self._context = RandomContext()

    def begin_rounds(self) -> None:
        """All bytes are measured: from now on times are."""

    def forward(self, module: StageModule, swap: Swap | None = None) -> Interval:
        self._context = RandomContext(swap=swap)
        leaves = {n: t.detach().requires_grad_(self.stage.needs_gradient(n)) for n, t in self.inputs.items()}
        start = self.clock()
        self._outputs = module.run_blocks({**leaves, **self.free}, self.fields, self._context)
        return start, self.clock()

    def backward(self) -> Interval:
        """The whole backward, or of a split module the input gradient alone."""
        roots = {name: tensor for name, tensor in self._outputs.items() if tensor.requires_grad}
        for name, tensor in roots.items():
            self._gradients.setdefault(name, torch.ones_like(tensor))
        gradients = [self._gradients[name] for name in roots]
        start = self.clock()
        if roots:
            torch.autograd.backward(list(roots.values()), gradients)
        end = self.clock()
        self._outputs = {}
        return start, end

    def weight_gradients(self) -> Interval:
        start = self.clock()
        for work in self._context.deferred:
            work()
        self._context.deferred.clear()
        return start, self.clock()

    def update(self) -> Interval:
        start = self.clock()
        self.weights.step()
        return start, self.clock()

    def new_version(self) -> Interval:
        """An update while a minibatch still reads the old weights."""
        self.weights.load_new_params(0)
        start, end = self.update()
        if self.weights.predicts:  # the next forward writes it
            self.weights.load_new_params(delay=Delay(1))
            end = self.clock()
        self.weights.release(0)
        return start, end

    def saved_bytes(self) -> tuple[dict[int, int], dict[str, Tensor]]:
        """Bytes that autograd saves, by address, without parameters, buffers and the batch; and the values made."""
        sources = (self.whole.parameters_by_name, self.whole.buffers_by_name, self.fields)
        outside = {address(t) for tensors in sources for t in tensors.values()}
        saved: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            where = address(tensor)
            if where and where not in outside:
                saved[where] = tensor.untyped_storage().nbytes()
            return tensor.detach()

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            self.forward(self.whole)
        made, self._outputs = self._outputs, {}
        return saved, made

    def deferred_bytes(self) -> int:
        """Bytes that deferred weight gradients hold, without the batch."""
        outside = {address(tensor) for tensor in self.fields.values()}
        self.forward(self.split)
        self.backward()
        waiting = {address(t): t.untyped_storage().nbytes() for t in waiting_tensors(self._context.deferred)}
        self._context.deferred.clear()
        self.weights.skip()
        return sum(size for where, size in waiting.items() if where not in outside)

    def working_bytes(self) -> tuple[int, int]:
        """The most that a forward, and a backward, allocates and frees again, beyond what is kept.

        Gradients of weights are there from the backward before. Gradients of the block's outputs count: another block
        made them, and they are alive meanwhile.
        """
        if self.device.type != "cuda":
            return 0, 0  # the CPU's allocator does not count
        self.forward(self.whole)
        self.backward()
        torch.cuda.reset_peak_memory_stats(self.device)
        self.forward(self.whole)
        forward = torch.cuda.max_memory_allocated(self.device) - torch.cuda.memory_allocated(self.device)
        received = sum(gradient.nbytes for gradient in self._gradients.values())
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self.backward()
        backward = torch.cuda.max_memory_allocated(self.device) - before + received
        self.weights.skip()
        return forward, backward

    def update_bytes(self) -> int:
        """The most that an update allocates and frees again, beyond the gradients that are there.

        Measured while the optimizer steps: all gradients are there in float32 then, in place of their own. While these
        are cast there is also one bucket of them (`weights/casting.py`) for each stage, which is not counted.
        """
        optimizers = self.weights.optimizers
        if self.device.type != "cuda" or not optimizers:
            return 0
        hook = optimizers[0].register_step_pre_hook(
            lambda *_: torch.cuda.reset_peak_memory_stats(self.device)
        )
        most = 0
        for _ in range(3):  # the first ones make the optimizer's state
            self.forward(self.whole)
            self.backward()
            before = torch.cuda.memory_allocated(self.device)
            parameters = self.weights.model_parameters if self.keeps_gradients else ()
            kept = [parameter.grad for parameter in parameters]
            self.update()
            del kept
            most = torch.cuda.max_memory_allocated(self.device) - before
        hook.remove()
        return max(0, most)

    def state_bytes(self) -> int:
        """Bytes of the optimizer's state, masters of their own included."""
        tensors = [*self.weights.optimizer_state()[0].values()]
        if self.weights.separate_masters:
            tensors += self.weights.master_parameters
        return sum(tensor.nbytes for tensor in tensors if tensor.dim())
