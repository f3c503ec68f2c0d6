"""A stage's work for one minibatch on tape: CUDA graphs, recorded once and played for each minibatch.

A GPU is done with a small kernel before its host has issued the next. A tape issues all of a forward, or of a
backward, at once. What is on it is fixed, so a minibatch is laid into its place and the results are copied out:

    record    forward, backward (and weight gradients, where they are split off): issued to nobody, written down
    play      inputs ▶ place, seeds ▶ generators, all kernels at once, outputs ▶ tensors of their own

Fixed are the places of inputs, weights and gradients too. So there is a tape for each minibatch in flight and each
version of the weights that it meets (`stage/graph_pool.py`). Gradients of weights are added to the places given.

Memory: what a forward saves lies in a pool of the place's own until its backward. Whatever is gone when a graph ends
lies in a pool that all of a stage's tapes share, for no two are played at once:

    blocks           0  1   2 recomputed     3  4           backward
    pool             own    shared           own            shared; own, where weight gradients wait for what it makes
    graphs           [0  1] [2             ] [copy  3  4]   [4  3  2 again  2  1  0]

Randomness: each block draws from a generator of its own, seeded before the tape is played as a block that is not on
tape seeds the device's: the masks are the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Generator, Tensor, nn

from vpipe.graph.materialise import stable_seed
from vpipe.stage.module import StageModule
from vpipe.stage.random import RandomContext
from vpipe.system.device_memory import Reserve, reserving

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE as Pool


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """On which everything is recorded: libraries hold memory for each stream that they were used on."""
    return torch.cuda.Stream(device)


class CaptureContext:
    """What the tapes of one stage share: a stream to record on, a pool, generators."""

    def __init__(self, module: StageModule, seed: int) -> None:
        self.module = module
        self.device = module.device
        self.stream = _stream(self.device)
        self.pool = torch.cuda.graph_pool_handle()
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

    def draw_from(self, block: int) -> None:
        """While a tape is recorded: what follows draws from this block's generator."""
        self._default.graphsafe_set_state(self.generators[block])

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Afterwards the device's generator is what it was."""
        before = self._default.graphsafe_get_state()
        try:
            yield
        finally:
            self._default.graphsafe_set_state(before)


class GraphSequence:
    """A stretch of a tape: graphs that are played one after the other, each recorded for one of two pools."""

    def __init__(self, deck: CaptureContext) -> None:
        self._deck = deck
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._pool = deck.pool

    def play(self) -> None:
        for graph in self._graphs:
            graph.replay()

    @contextmanager
    def recording(self, pool: Pool) -> Iterator[None]:
        self._pool = pool
        deck = self._deck
        deck.stream.wait_stream(torch.cuda.current_stream(deck.device))
        with torch.cuda.stream(deck.stream), deck.as_before():
            self._begin(pool)
            try:
                yield
            except BaseException:
                with suppress(RuntimeError):  # what went wrong is told by the first error
                    self._end()
                raise
            self._end()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """What is recorded meanwhile leaves nothing behind but what the next graph copies first."""
        self._end()
        self._begin(self._deck.pool)
        yield
        self._end()
        self._begin(self._pool)

    def _begin(self, pool: Pool) -> None:
        graph = torch.cuda.CUDAGraph()
        for generator in self._deck.generators.values():
            graph.register_generator_state(generator)
        self._graphs.append(graph)
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")

    def _end(self) -> None:
        with warnings.catch_warnings():
            # It is empty where a stage begins with a block that is recomputed.
            warnings.simplefilter("ignore")
            self._graphs[-1].capture_end()


@dataclass
class _CapturedMinibatch(RandomContext):
    """The context of a minibatch that is recorded."""

    deck: CaptureContext | None = None
    reel: GraphSequence | None = None

    def seed_block(self, block: int, device: torch.device) -> None:
        assert self.deck is not None
        self.deck.draw_from(block)

    @contextmanager
    def apart(self) -> Iterator[None]:
        assert self.reel is not None
        with self.reel.apart():
            yield

    def brought_back(self, made: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(tensor.clone() for tensor in made)


@dataclass
class SlotMemory:
    """Where a minibatch lies while it is in flight: fixed memory, which all tapes of this place use."""

    inputs: dict[str, Tensor]
    fields: dict[str, Tensor]
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Of the outputs, by name."""
    pool: Pool = field(default_factory=torch.cuda.graph_pool_handle)

    def lay(self, inputs: Mapping[str, Tensor], fields: Mapping[str, Tensor]) -> None:
        targets = [*self.inputs.values(), *self.fields.values()]
        sources = [*(inputs[name] for name in self.inputs), *(fields[name] for name in self.fields)]
        if targets:
            torch._foreach_copy_(targets, sources)


class StageCudaGraphs:
    """Forward and backward of a module's minibatch at one place, with weights and gradients at one place each."""

    def __init__(
        self,
        deck: CaptureContext,
        place: SlotMemory,
        weights: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
    ) -> None:
        self._deck, self._place = deck, place
        self._forward, self._backward, self._weight_gradients = (
            GraphSequence(deck),
            GraphSequence(deck),
            GraphSequence(deck),
        )
        self._outputs: dict[str, Tensor] = {}
        self._input_gradients: dict[str, Tensor] = {}
        with reserving(deck.reserve, deck.device):
            self._record(weights, gradients)

    def forward(self, minibatch: int) -> dict[str, Tensor]:
        """Of what lies at the place; the outputs by name."""
        self._deck.seed(minibatch)
        self._forward.play()
        return _copies(self._outputs)

    def backward(self, minibatch: int) -> dict[str, Tensor]:
        """Of the gradients that lie at the place; those of the inputs by name."""
        self._deck.seed(minibatch)  # for what is recomputed
        self._backward.play()
        return _copies(self._input_gradients)

    def weight_gradients(self) -> None:
        """The part of backward that was put off, if any was."""
        self._weight_gradients.play()

    def _record(self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
        deck, place, module = self._deck, self._place, self._deck.module
        # Leaves of their own: nothing that is recorded must wait for what was issued before.
        stand_ins = {name: nn.Parameter(tensor) for name, tensor in weights.items()}
        for name, parameter in stand_ins.items():
            parameter.grad = gradients[name]
        needs = module.stage.needs_gradient
        leaves = {name: t.detach().requires_grad_(needs(name)) for name, t in place.inputs.items()}
        context = _CapturedMinibatch(deck=deck, reel=self._forward)
        with module.reading(stand_ins):
            with self._forward.recording(place.pool):
                outputs = module.forward(leaves, place.fields, context)
            roots = {name: tensor for name, tensor in outputs.items() if tensor.requires_grad}
            for name, tensor in roots.items():
                if name not in place.gradients:
                    place.gradients[name] = torch.zeros_like(tensor)
            with self._backward.recording(place.pool if module.splits else deck.pool):
                if roots:
                    torch.autograd.backward(list(roots.values()), [place.gradients[name] for name in roots])
                self._input_gradients = {
                    name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                    for name, leaf in leaves.items()
                    if leaf.requires_grad
                }
            if context.deferred:
                with self._weight_gradients.recording(deck.pool):
                    for work in context.deferred:
                        work()
                context.deferred.clear()
        self._outputs = {name: tensor.detach() for name, tensor in outputs.items()}


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}
