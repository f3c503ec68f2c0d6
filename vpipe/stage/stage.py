"""One stage on one rank: its module, its weights, and the minibatches between forward and backward."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from vpipe.graph import StageGraph
from vpipe.stage import RandomContext, StageModule
from vpipe.stage.graph_choice import LaunchTimes, timed
from vpipe.stage.graph_pool import GraphPool, GraphSlot
from vpipe.stage.held import Held, Hold
from vpipe.stage.host_store import make_store
from vpipe.stage.split import Deferred, waiting_tensors
from vpipe.stage.swap import Swap
from vpipe.weights import NO_DELAY, Changes, Delay, OptimizerWithWeightStashing
from vpipe.weights.optimizer_state import Record

MODEL, OPTIMIZER = "model.", "optimizer."
"""Prefixes of the names in a stage's state."""


@dataclass
class InFlight:
    """One minibatch between its forward and the end of its backward."""

    inputs: dict[str, Tensor]
    loss_dtype: torch.dtype | None = None
    roots: dict[str, GradientEdge] = field(default_factory=dict)  # where backward starts
    gradients: dict[str, dict[int, Tensor]] = field(default_factory=dict)  # value ▶ reader ▶ gradient
    deferred: list[partial[None]] = field(default_factory=list)  # weight gradients to compute later
    counted: list[Hold] = field(
        default_factory=list
    )  # the tensors that they hold, if `Stage.held` counts them
    swap: Swap | None = None
    slot: GraphSlot | None = None  # of the CUDA graphs that are replayed for it
    times: LaunchTimes | None = None  # where it decides whether others are replayed


class StageState(NamedTuple):
    """The state of one or several stages for resuming: tensors `model.<name>` and `optimizer.<name>.<key>`."""

    tensors: dict[str, Tensor]
    optimizers: list[Record]


class Stage:
    """Forward and backward of one stage. Knows no rank, no schedule and no channel.

    `evaluation` computes the loss alone, `with_output` what the model's output is made of, too.
    """

    def __init__(
        self,
        graph: StageGraph,
        module: StageModule,
        evaluation: StageModule,
        with_output: StageModule,
        optimizer: OptimizerWithWeightStashing,
        seed: int,
        graph_pool: GraphPool | None = None,
    ) -> None:
        self.graph = graph
        self.index = graph.index
        self.module = module
        self.evaluation = evaluation
        self.with_output = with_output
        self.optimizer = optimizer
        self.seed = seed
        self.graph_pool = graph_pool
        self.arrived: dict[int, dict[str, Tensor]] = {}  # minibatch ▶ values from other stages
        self.in_flight: dict[int, InFlight] = {}
        self.gradients_ready: Callable[[Iterable[nn.Parameter]], object] | None = None
        """Called in a backward with parameters whose gradients are complete, if set."""
        self.held: Held | None = None  # counts the bytes that autograd holds, if set
        self._store = make_store(module.device) if module.swaps else None

    def watch_gradients(self) -> None:
        """From now on `gradients_ready` may be set."""
        for parameter in self.optimizer.model_parameters:
            parameter.register_post_accumulate_grad_hook(self._accumulated)

    def hand_over(self, minibatch: int, value: str, tensor: Tensor) -> None:
        self.arrived.setdefault(minibatch, {})[value] = tensor

    def forward(
        self, minibatch: int, fields: dict[str, Tensor], delay: Delay = NO_DELAY
    ) -> dict[str, Tensor]:
        """Run the blocks with the newest weights and keep what backward needs. Returns the outputs.

        Where weights are predicted, they are those of `delay` updates later.
        """
        self.optimizer.load_new_params(minibatch, delay)
        if self._store:
            self._store.settle()
        arrived = self.arrived.pop(minibatch, {})
        pool = self.graph_pool
        if pool and self.held is None and (slot := pool.take_slot(arrived, fields)):
            self.in_flight[minibatch] = InFlight({}, slot=slot)
            return slot.forward(minibatch)
        inputs = {
            name: tensor.detach().requires_grad_(self.graph.needs_gradient(name))
            for name, tensor in arrived.items()
        }
        swap, times = Swap(self._store) if self._store else None, pool.launch_times() if pool else None
        flight = InFlight(inputs, swap=swap, times=times)
        context = RandomContext(self.seed, minibatch, flight.deferred, flight.swap, self.held)
        with timed(times):
            outputs = self.module.forward(inputs, fields, context)  # no hooks: a call costs microseconds
        if flight.swap:
            flight.swap.leave()
        # The edge, not the tensor: backward does not need the value of an output.
        flight.roots = {n: get_gradient_edge(t) for n, t in outputs.items() if t.requires_grad}
        if "loss" in outputs:
            flight.loss_dtype = outputs["loss"].dtype
        self.in_flight[minibatch] = flight
        return {name: tensor.detach() for name, tensor in outputs.items()}

    def evaluate(
        self, minibatch: int, fields: dict[str, Tensor], *, keep_output: bool = False
    ) -> dict[str, Tensor]:
        """Run the blocks with the newest weights, for the outputs alone."""
        module = self.with_output if keep_output else self.evaluation
        self.optimizer.load_new_params()
        with torch.no_grad():
            context = RandomContext(self.seed, minibatch, [])
            return module(self.arrived.pop(minibatch, {}), fields, context)

    def gradient_arrived(self, minibatch: int, value: str, reader: int, gradient: Tensor) -> None:
        self.in_flight[minibatch].gradients.setdefault(value, {})[reader] = gradient

    def fetch(self, minibatch: int) -> None:
        """Shortly before a backward: start to copy back what was swapped, if its forward has run."""
        flight = self.in_flight.get(minibatch)
        if flight and flight.swap:
            flight.swap.fetch()

    def backward(self, minibatch: int, seed_gradient: float) -> dict[str, Tensor]:
        """Gradients of the inputs, by name; those of the weights are added to `.grad` or deferred.

        The criterion's stage starts from its loss, whose gradient is `seed_gradient`.
        """
        self.optimizer.load_old_params(minibatch)
        flight = self.in_flight[minibatch]
        # Summed in the order of the readers, so that the result does not depend on the order of arrival.
        gradients = {name: _sum(by[reader] for reader in sorted(by)) for name, by in flight.gradients.items()}
        if self.graph_pool:
            self.graph_pool.bind_gradients()
        if flight.slot:
            inputs = flight.slot.backward(minibatch, gradients, seed_gradient)
        else:
            self.fetch(minibatch)
            with timed(flight.times):
                inputs = self._run_backward(flight, gradients, seed_gradient)
        flight.gradients.clear()
        self.optimizer.release(minibatch)
        return inputs

    def weight_gradients(self, minibatch: int) -> None:
        """The deferred part of backward."""
        flight = self.in_flight[minibatch]
        if flight.slot:
            flight.slot.weight_gradients()
        if self.gradients_ready is None:
            for accumulate in flight.deferred:
                accumulate()
        else:
            _accumulate_all(flight.deferred, self.optimizer.model_parameters, self.gradients_ready)
        flight.deferred.clear()  # the graph's own contexts hold the list
        flight.counted.clear()

    def _accumulated(self, parameter: nn.Parameter) -> None:
        if self.gradients_ready is not None:
            self.gradients_ready((parameter,))

    def finish(self, minibatch: int) -> None:
        flight = self.in_flight.pop(minibatch)
        if self.graph_pool:
            self.graph_pool.finish(flight.slot, flight.times)

    def take_gradient(self, parameter: nn.Parameter) -> Tensor:
        """The summed gradient of a parameter, for a caller that keeps it; zeros if there is none."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return torch.zeros_like(parameter)
        return gradient.clone() if self.graph_pool else gradient  # graphs add the next one there

    def state(self) -> dict[str, Tensor]:
        """Parameters (float32 masters under mixed precision) and buffers by the model's own names."""
        tensors = self.module.tensors_by_name
        return {name: tensor.detach() for name, tensor in tensors.items()} | self.optimizer.values()

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Set the tensors that are named; the others keep their values."""
        trained = set(self.optimizer.names)
        for name, tensor in self.module.tensors_by_name.items():
            if name in state and name not in trained:
                tensor.copy_(state[name])
        self.optimizer.load_values(state)

    def training_state(self, besides: Collection[str] = ()) -> StageState:
        """State for resuming, without the parameters and buffers in `besides`, which another stage saves."""
        weights = {f"{MODEL}{name}": t for name, t in self.state().items() if name not in besides}
        momenta, records = self.optimizer.optimizer_state(besides)
        return StageState(weights | {f"{OPTIMIZER}{name}": t for name, t in momenta.items()}, records)

    def load_training_state(self, state: StageState) -> Changes:
        """Set everything from the state of any partition's stages; entries of other stages are skipped."""
        self.load_state(_below(MODEL, state.tensors))
        return self.optimizer.load_optimizer_state(_below(OPTIMIZER, state.tensors), state.optimizers)

    def _run_backward(
        self, flight: InFlight, given: Mapping[str, Tensor], seed_gradient: float
    ) -> dict[str, Tensor]:
        roots, gradients = [], []
        for name, root in flight.roots.items():
            if name == "loss":
                device = self.module.device
                gradients.append(torch.full((), seed_gradient, dtype=flight.loss_dtype, device=device))
            elif name in given:
                gradients.append(given[name])
            else:
                continue
            roots.append(root)
        if roots:
            torch.autograd.backward(roots, gradients)
        flight.roots.clear()
        inputs = {
            name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for name, tensor in flight.inputs.items()
            if tensor.requires_grad
        }
        flight.inputs.clear()
        if self.held is not None:
            flight.counted = [Hold(tensor, self.held) for tensor in waiting_tensors(flight.deferred)]
        return inputs

    def leftovers(self) -> list[str]:
        place = f"stage {self.index}"
        found = [f"{place} still holds minibatch {m}" for m in self.in_flight]
        found += [f"{place} did not use what arrived for minibatch {m}" for m in self.arrived]
        if self.optimizer.num_versions > 1:
            found.append(f"{place} still holds {self.optimizer.num_versions} weight versions")
        return found


def _accumulate_all(
    deferred: Deferred, parameters: Sequence[nn.Parameter], ready: Callable[[Iterable[nn.Parameter]], object]
) -> None:
    """Make the deferred gradients; after each, those are complete that nothing behind it adds to."""
    last = {id(tensor): number for number, work in enumerate(deferred) for tensor in work.args[2:]}
    completed: dict[int, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        completed[last.get(id(parameter), -1)].append(parameter)
    ready(completed[-1])
    for number, accumulate in enumerate(deferred):
        accumulate()
        ready(completed[number])


def _sum(gradients: Iterator[Tensor]) -> Tensor:
    return sum(gradients, start=next(gradients))


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
