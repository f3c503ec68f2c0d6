"""CUDA graphs of a stage: forward and backward of one minibatch, captured once and then replayed.

A GPU finishes a small kernel before its host has launched the next one. Replaying a graph launches all kernels of a
forward, or of a backward, at once. A graph reads and writes fixed addresses, so data is copied in and out:

    forward    inputs ▶ slot, seed the generators, replay, clone the outputs
    backward   output gradients ▶ slot, seed the generators, replay, clone the input gradients

Weights and their gradients have fixed addresses too. So there is one set of graphs for each slot (a minibatch in
flight) and each address that the weights have had (`stage/graph_pool.py`). Weight gradients are added in place.

Memory: what a forward saves for its backward is allocated in the slot's own pool. What is free again when a graph ends
comes from a pool that all graphs of the stage share, because no two of them run at once:

    blocks     0  1   2 recomputed     3  4            backward
    pool       slot   shared           slot            shared; slot if it is split: weight gradients read its results
    graphs     [0  1] [2             ] [clone  3  4]   [4  3  2 again  2  1  0]

Random numbers: each block draws from its own generator, which is seeded before a replay as an eager block seeds the
device's. So the dropout masks are the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Generator, Tensor, nn

from vpipe.graph.materialise import stable_seed
from vpipe.stage.module import StageModule
from vpipe.stage.random import RandomContext
from vpipe.system.device_memory import Reserve, reserving

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

Pool: TypeAlias = "_POOL_HANDLE"


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures: libraries hold memory for each stream that they were used on."""
    return torch.cuda.Stream(device)


class CaptureContext:
    """Shared by all graphs of a stage: capture stream, memory pool, a generator for each block that draws."""

    def __init__(self, module: StageModule, seed: int, pool: Pool | None = None) -> None:
        self.module = module
        self.device = module.device
        self.stream = _capture_stream(self.device)
        self.pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self.reserve = Reserve()
        self._seed = seed
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        self._default = torch.cuda.default_generators[index]
        self.generators: dict[int, Generator] = {
            block: self._default.clone_state() for block in module.blocks_that_draw
        }

    def seed(self, minibatch: int) -> None:
        for block, generator in self.generators.items():
            generator.manual_seed(stable_seed(self._seed, block, minibatch))

    def use_generator(self, block: int) -> None:
        """During capture: the next operations draw from this block's generator."""
        self._default.graphsafe_set_state(self.generators[block])

    @contextmanager
    def restoring_generator(self) -> Iterator[None]:
        """A capture registers the device's generator, and one that fails leaves it unusable: give it a copy."""
        before = self._default.graphsafe_get_state()
        self._default.graphsafe_set_state(self._default.clone_state())
        try:
            yield
        finally:
            self._default.graphsafe_set_state(before)


class GraphSequence:
    """Graphs that are replayed one after the other, each captured with one of two memory pools."""

    def __init__(self, context: CaptureContext) -> None:
        self.context = context
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._pool = context.pool

    def replay(self) -> None:
        for graph in self._graphs:
            graph.replay()

    @contextmanager
    def capturing(self, pool: Pool) -> Iterator[None]:
        self._pool = pool
        context = self.context
        current = torch.cuda.current_stream(context.device)
        context.stream.wait_stream(current)
        with torch.cuda.stream(context.stream), context.restoring_generator():
            self._begin(pool)
            try:
                yield
            except BaseException:
                with suppress(RuntimeError):  # the first error says what went wrong
                    self._end()
                raise
            self._end()
        # A capture begins with kernels that run, and write the generators' seeds: a replay writes its own behind them.
        current.wait_stream(context.stream)

    @contextmanager
    def in_shared_pool(self) -> Iterator[None]:
        """A graph of its own in the stage's shared pool. The next graph has to clone first what it reads of it."""
        self._end()
        self._begin(self.context.pool)
        yield
        self._end()
        self._begin(self._pool)

    def _begin(self, pool: Pool) -> None:
        graph = torch.cuda.CUDAGraph()
        for generator in self.context.generators.values():
            graph.register_generator_state(generator)
        self._graphs.append(graph)
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")

    def _end(self) -> None:
        with warnings.catch_warnings():
            # torch warns of an empty graph: there is one where a stage begins with a recomputed block.
            warnings.simplefilter("ignore")
            self._graphs[-1].capture_end()


class _CapturedMinibatch(RandomContext):
    """The context of a minibatch during capture."""

    def __init__(self, forward: GraphSequence) -> None:
        super().__init__()
        self._forward = forward

    def seed_block(self, block: int, device: torch.device) -> None:
        self._forward.context.use_generator(block)

    @contextmanager
    def temporary_memory(self) -> Iterator[None]:
        with self._forward.in_shared_pool():
            yield

    def keep_outputs(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(tensor.clone() for tensor in outputs)


@dataclass
class SlotMemory:
    """Fixed memory of one minibatch in flight, for all graphs of its slot."""

    inputs: dict[str, Tensor]
    fields: dict[str, Tensor]
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Of the outputs, by name."""
    pool: Pool = field(default_factory=torch.cuda.graph_pool_handle)

    def load(self, inputs: Mapping[str, Tensor], fields: Mapping[str, Tensor]) -> None:
        targets = [*self.inputs.values(), *self.fields.values()]
        sources = [*(inputs[name] for name in self.inputs), *(fields[name] for name in self.fields)]
        if targets:
            torch._foreach_copy_(targets, sources)


class StageCudaGraphs:
    """Forward and backward of a stage for one slot, one address of the weights and one of their gradients."""

    def __init__(
        self,
        context: CaptureContext,
        memory: SlotMemory,
        weights: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
    ) -> None:
        self._context, self._memory = context, memory
        self._forward, self._backward = GraphSequence(context), GraphSequence(context)
        self._weight_gradients = GraphSequence(context)
        self._outputs: dict[str, Tensor] = {}
        self._input_gradients: dict[str, Tensor] = {}
        with reserving(context.reserve, context.device):
            self._capture(weights, gradients)

    def forward(self, minibatch: int) -> dict[str, Tensor]:
        """Outputs by name, for the inputs and fields in the slot's memory."""
        self._context.seed(minibatch)
        self._forward.replay()
        return clones(self._outputs)

    def backward(self, minibatch: int) -> dict[str, Tensor]:
        """Gradients of the inputs by name, for the output gradients in the slot's memory."""
        self._context.seed(minibatch)  # for recomputed blocks
        self._backward.replay()
        return clones(self._input_gradients)

    def weight_gradients(self) -> None:
        """The deferred part of a split backward, if there is one."""
        self._weight_gradients.replay()

    def _capture(self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
        context, memory, module = self._context, self._memory, self._context.module
        # New leaves, because a capture must not depend on work that was launched before it.
        parameters = {name: nn.Parameter(tensor) for name, tensor in weights.items()}
        for name, parameter in parameters.items():
            parameter.grad = gradients[name]
        needs = module.stage.needs_gradient
        leaves = {name: t.detach().requires_grad_(needs(name)) for name, t in memory.inputs.items()}
        minibatch = _CapturedMinibatch(self._forward)
        with module.reading(parameters):
            with self._forward.capturing(memory.pool):
                outputs = module.forward(leaves, memory.fields, minibatch)
            roots = {name: tensor for name, tensor in outputs.items() if tensor.requires_grad}
            for name, tensor in roots.items():
                if name not in memory.gradients:
                    memory.gradients[name] = torch.zeros_like(tensor)
            with self._backward.capturing(memory.pool if module.splits else context.pool):
                if roots:
                    torch.autograd.backward(list(roots.values()), [memory.gradients[name] for name in roots])
                self._input_gradients = {
                    name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                    for name, leaf in leaves.items()
                    if leaf.requires_grad
                }
            if minibatch.deferred:
                with self._weight_gradients.capturing(context.pool):
                    for work in minibatch.deferred:
                        work()
                minibatch.deferred.clear()
        self._outputs = {name: tensor.detach() for name, tensor in outputs.items()}


def clones(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}
