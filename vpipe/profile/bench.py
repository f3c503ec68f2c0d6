"""One stage on the bench: forward, backward and update of its blocks, timed apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from vpipe.communication import HOST
from vpipe.graph import StageGraph
from vpipe.profile.clocks import Lap, clock_of
from vpipe.stage import RandomContext, StageModule
from vpipe.stage.held import address
from vpipe.stage.precision import cast_module
from vpipe.stage.split import waiting_tensors
from vpipe.stage.swap import Swap
from vpipe.weights import OptimizerFactory, OptimizerWithWeightStashing

FORWARD, BACKWARD, UPDATE, VERSION = "F", "B", "STEP", "VERSION"
ADDING = "B behind another"
AGAIN_SPLIT = ("F of a split module that recomputes", "I of it", "W of it")
AGAIN_FORWARD, AGAIN_BACKWARD = "F of a module that recomputes", "B of a module that recomputes"
SPLIT_FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = "F of a split module", "I", "W"

WARM = 2
SLOW = 10.0
"""Seconds of a round of which one is enough, and one to warm up: it takes far longer than whatever disturbs it."""


class Bench:
    """A stage with fixed inputs. What it computes from the batch alone is computed once, and not timed."""

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
    ) -> None:
        self.stage = stage
        self.fields = fields
        self.device = device
        self.compile = compile
        self.whole = StageModule(stage, model, device=device, compile=compile)
        originals = cast_module(self.whole, dtype)
        self.split = StageModule(stage, self.whole, split=True, compile=compile)
        self.recomputing = StageModule(stage, self.whole, recompute=stage.blocks, compile=compile)
        self.split_recomputing = StageModule(
            stage, self.whole, split=True, recompute=stage.blocks, compile=compile
        )
        self.weights = OptimizerWithWeightStashing(
            self.whole.parameters_by_name, optimizer, master_values=originals
        )
        self.inputs = {name: values[name] for name in stage.reads}
        self.free = self.whole.free_values(fields, RandomContext())
        self.laps: dict[str, list[Lap]] = defaultdict(list)
        self.clock = clock_of(device)
        self._outputs: dict[str, Tensor] = {}
        self._gradients: dict[str, Tensor] = {}
        self._context = RandomContext()

    def begin(self) -> None:
        """Sizes are measured: from now on rounds are run."""

    def forward(self, module: StageModule, swap: Swap | None = None) -> Lap:
        self._context = RandomContext(swap=swap)
        leaves = {n: t.detach().requires_grad_(self.stage.needs_gradient(n)) for n, t in self.inputs.items()}
        start = self.clock()
        self._outputs = module.run_blocks({**leaves, **self.free}, self.fields, self._context)
        return start, self.clock()

    def backward(self) -> Lap:
        """Whole, or of a split module the input gradient alone."""
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

    def weight_gradients(self) -> Lap:
        start = self.clock()
        for work in self._context.deferred:
            work()
        self._context.deferred.clear()
        return start, self.clock()

    def update(self) -> Lap:
        start = self.clock()
        self.weights.step()
        return start, self.clock()

    def new_version(self) -> Lap:
        """An update while a minibatch still reads the old weights."""
        self.weights.load_new_params(0)
        taken = self.update()
        self.weights.release(0)
        return taken

    def saved_bytes(self) -> tuple[dict[int, int], dict[str, Tensor]]:
        """What autograd saves, by address, without what is there anyway; and the values that are made."""
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
        return saved, self._outputs

    def deferred_bytes(self) -> int:
        """What weight gradients that wait hold, without what is there anyway."""
        outside = {address(tensor) for tensor in self.fields.values()}
        self.forward(self.split)
        self.backward()
        waiting = {address(t): t.untyped_storage().nbytes() for t in waiting_tensors(self._context.deferred)}
        self._context.deferred.clear()
        self.weights.skip()
        return sum(size for where, size in waiting.items() if where not in outside)

    def working_bytes(self) -> tuple[int, int]:
        """What a forward, and a backward, makes and gives back, at most, beyond what was there and what is kept.

        Gradients of weights are there from the backward before. That of the block's outputs, which another block made,
        lies there meanwhile.
        """
        if self.device.type != "cuda":
            return 0, 0  # nobody counts there
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
        """What an update makes and gives back, at most, beyond the gradients that are there.

        It is looked at while the optimizer steps: gradients in float32 all lie there then, in place of their own. While
        these are cast a bucket of them (`weights/casting.py`) lies beside it, once for a stage: that is not counted.
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
            stay = self.gradients_that_stay()
            self.update()
            del stay
            most = torch.cuda.max_memory_allocated(self.device) - before
        hook.remove()
        return max(0, most)

    def gradients_that_stay(self) -> list[Tensor]:
        """Those whose memory an update does not give back."""
        return []

    def discard(self) -> None:
        """Let go of a forward that has no backward."""
        self._outputs = {}

    def state_bytes(self) -> int:
        """Bytes of the optimizer's state, float32 masters included."""
        tensors = [*self.weights.optimizer_state()[0].values()]
        if self.weights.mixed:
            tensors += self.weights.master_parameters
        return sum(tensor.nbytes for tensor in tensors if tensor.dim())


def run_round(benches: Sequence[Bench]) -> None:
    """A training step of two minibatches over all benches, one with backward split, and both with all recomputed.

    In the order of a pipeline: so each finds the caches as it would there, filled with the others' data.
    """
    for bench in benches:
        bench.laps[FORWARD].append(bench.forward(bench.whole))
    for bench in reversed(benches):
        bench.laps[BACKWARD].append(bench.backward())
    for bench in benches:
        bench.laps[FORWARD].append(bench.forward(bench.whole))
    for bench in reversed(benches):
        bench.laps[ADDING].append(bench.backward())
    for bench in benches:
        bench.laps[UPDATE].append(bench.update())
    for bench in benches:
        bench.laps[SPLIT_FORWARD].append(bench.forward(bench.split))
    for bench in reversed(benches):
        bench.laps[INPUT_GRADIENT].append(bench.backward())
        bench.laps[WEIGHT_GRADIENT].append(bench.weight_gradients())
    for bench in benches:
        bench.laps[VERSION].append(bench.new_version())
    for bench in benches:
        bench.laps[AGAIN_FORWARD].append(bench.forward(bench.recomputing))
    for bench in reversed(benches):
        bench.laps[AGAIN_BACKWARD].append(bench.backward())
        bench.weights.skip()
    forward, first, second = AGAIN_SPLIT
    for bench in benches:
        bench.laps[forward].append(bench.forward(bench.split_recomputing))
    for bench in reversed(benches):
        bench.laps[first].append(bench.backward())
        bench.laps[second].append(bench.weight_gradients())
        bench.weights.skip()


def run_rounds(benches: Sequence[Bench], least: int, most: int, seconds: float) -> None:
    """Some rounds to warm up, then at least `least`, and more (`most` at most) while there is time."""
    for _ in range(WARM):
        began = perf_counter()
        run_round(benches)
        if perf_counter() - began > SLOW:
            least = 1
            break
    for bench in benches:
        bench.laps.clear()
    deadline = perf_counter() + seconds
    for number in range(most):
        if number >= least and perf_counter() > deadline:
            break
        run_round(benches)
