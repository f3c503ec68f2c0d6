"""The plain model, run eagerly, with the block and the stage of its operations from the captured graph.

A reference needs two facts of the graph: the block of each operation that draws random numbers, because a
block's dropout masks follow from (seed, block, minibatch), and the stage of each operation that reads a
tied parameter, because asynchronous stages read it in different versions. Both are found by counting: the
n-th draw, or read, of the eager run is the n-th of the graph.

    eager   embedding(W)  dropout  linear  dropout  linear  ...  linear(W)
    graph   block 0       block 0          block 1               block 8
                          seed 0           seed 1

In an `nn.Sequential` that cannot be exported a child is one operation: the running child gives both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from vpipe.errors import VPipeError
from vpipe.graph import ModelGraph, StageGraph, stable_seed
from vpipe.graph.batch import BatchLayout
from vpipe.graph.loss import LossModule
from vpipe.graph.ownership import is_random
from vpipe.graph.trace import Kind

Tied = Mapping[str, Mapping[int, Tensor]]
"""A tied parameter's name ▶ stage ▶ the value that this stage reads."""


class EagerModel:
    """A model whose loss is computed with any values of its parameters; the model itself is not changed."""

    def __init__(
        self,
        model: nn.Module,
        graph: ModelGraph,
        loss_fn: Callable[..., Tensor] | None,
        seed: int,
        stages: Sequence[StageGraph] = (),
    ) -> None:
        self.model = model
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.layout = graph.check.layout
        self.module = LossModule(model, self.layout, loss_fn)
        self.seed = seed
        self.opaque = graph.trace.boundaries is not None
        stage_of = {block: stage.index for stage in stages for block in stage.blocks}
        self.draws = [b.index for b in graph.blocks for n in b.nodes if is_random(n, graph.trace.root)]
        self.draws_single_numbers = any(
            is_random(node, graph.trace.root)
            and node in graph.trace.specs
            and not graph.trace.specs[node].shape
            for block in graph.blocks
            for node in block.nodes
        )
        self.reads = _reads(graph, stage_of)
        self.children = _children(graph, stage_of) if self.opaque else {}
        self.slots = _slots(self.module, model)

    def loss(
        self,
        batch: Any,
        minibatch: int,
        values: Mapping[str, Tensor] | None = None,
        tied: Tied | None = None,
    ) -> Tensor:
        """The loss of one minibatch: with the parameters as they are, or with the values given by name."""
        entries = self.layout.entries(batch)
        tensors = [entries[name] for name in self.layout.tensors]
        with contextlib.ExitStack() as stack:
            follow = stack.enter_context(_Follow(self, minibatch, tied or {}))
            if self.opaque:
                stack.enter_context(follow.children_watched())
            if values is None:
                loss = self.module(tensors)
            else:
                first = {name: next(iter(by_stage.values())) for name, by_stage in (tied or {}).items()}
                known = {**values, **first}
                parameters = {slot: known[name] for slot, name in self.slots.items() if name in known}
                loss = functional_call(self.module, parameters, (tensors,), tie_weights=False)
            follow.check_end()
        return loss


@torch.no_grad()
def check_runs(model: nn.Module, batch: Any, loss_fn: Callable[..., Tensor] | None, dtype: str) -> None:
    """Run the plain model once: an error there has nothing to do with pipelines."""
    layout = BatchLayout(model, batch, loss_fn)
    entries = layout.entries(batch)
    try:
        LossModule(model, layout, loss_fn)([entries[name] for name in layout.tensors])
    except RuntimeError as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise VPipeError(
            f"{type(model).__name__} does not run in {dtype}, even without a pipeline: {reason.strip()}; "
            "try another dtype, or run it once on the batch to see what is wrong"
        ) from error


class _Follow(TorchFunctionMode):
    """Sees every call of a torch function in one run of the model."""

    def __init__(self, eager: EagerModel, minibatch: int, tied: Tied) -> None:
        super().__init__()
        self.eager = eager
        self.minibatch = minibatch
        self.tied = {id(next(iter(by_stage.values()))): (name, by_stage) for name, by_stage in tied.items()}
        self.drawn = 0
        self.read = dict.fromkeys(tied, 0)
        self.block: int | None = None
        self.stage: int | None = None  # of the running child of an opaque model
        if not eager.opaque:
            self._seed_next()

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        used = {id(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        reads = [self.tied[key] for key in used & self.tied.keys()]
        if reads:
            args, kwargs = self._substitute(args, kwargs)
        if self.eager.opaque:
            return function(*args, **kwargs)
        before = self._random_state()
        result = function(*args, **kwargs)
        if function is torch.rand and not result.ndim and not self.eager.draws_single_numbers:
            # Drawn only to decide whether a layer is skipped, which capture has left out (`graph/capture_mode.py`).
            self._restore(before)
        elif not torch.equal(before, self._random_state()):
            self.drawn += 1
            self._seed_next()
        # A call that returns no tensor reads only a size or a dtype.
        if reads and any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(result)):
            for name, _ in reads:
                self.read[name] += 1
        return result

    def _random_state(self) -> Tensor:
        """The state of the generator that the model draws from."""
        device = self.eager.device
        return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()

    def _restore(self, state: Tensor) -> None:
        device = self.eager.device
        torch.cuda.set_rng_state(state, device) if device.type == "cuda" else torch.set_rng_state(state)

    def check_end(self) -> None:
        """Raise unless both runs have drawn, and read tied parameters, equally often: counting needs that."""
        if self.eager.opaque:
            return
        graph = {"random numbers": len(self.eager.draws)}
        graph |= {name: len(self.eager.reads[name]) for name in self.read}
        for what, count in ({"random numbers": self.drawn} | self.read).items():
            if count != graph[what]:
                raise VPipeError(
                    f"the plain model uses {what} {count} times, its captured graph {graph[what]} times: "
                    "the two cannot be compared draw by draw; set dropout to 0, or untie the parameter"
                )

    @contextlib.contextmanager
    def children_watched(self) -> Iterator[None]:
        def entered(block: int, stage: int) -> Callable[..., None]:
            def hook(*_: object) -> None:
                self.stage = stage
                self._seed(block)

            return hook

        places = self.eager.children.items()
        hooks = [
            self.eager.model.get_submodule(name).register_forward_pre_hook(entered(*place))
            for name, place in places
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _seed_next(self) -> None:
        """Seed for the next draw right after the one before: nothing draws between them."""
        if self.drawn < len(self.eager.draws):
            self._seed(self.eager.draws[self.drawn])

    def _seed(self, block: int) -> None:
        if block != self.block:
            torch.manual_seed(stable_seed(self.eager.seed, block, self.minibatch))
            self.block = block

    def _substitute(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        def value(leaf: Any) -> Any:
            if id(leaf) not in self.tied:
                return leaf
            name, by_stage = self.tied[id(leaf)]
            return by_stage[self._reader(name)]

        return pytree.tree_map(value, (args, kwargs))

    def _reader(self, name: str) -> int:
        """The stage of the operation that reads the parameter now."""
        if self.stage is not None:
            return self.stage
        readers = self.eager.reads[name]
        return readers[min(self.read[name], len(readers) - 1)]


def _slots(module: LossModule, model: nn.Module) -> dict[str, str]:
    """Path of each parameter ▶ the parameter's first name in the model.

    A module that is used in several places counts once: `functional_call` would not restore a value swapped twice.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        f"{path}.{own}": names[id(p)]
        for path, inner in module.named_modules()
        for own, p in inner.named_parameters(recurse=False, remove_duplicate=False)
        if id(p) in names  # a loss function may have parameters, which are not trained
    }


def _reads(graph: ModelGraph, stage_of: Mapping[int, int]) -> dict[str, list[int]]:
    """For each parameter the stages of the operations that read it, in order."""
    reads: dict[str, list[int]] = {}
    for block in graph.blocks if stage_of else ():
        for node in block.nodes:
            for value in node.all_input_nodes:
                if graph.trace.kind(value) is Kind.PARAMETER:
                    reads.setdefault(graph.trace.inputs[value].name, []).append(stage_of[block.index])
    return reads


def _children(graph: ModelGraph, stage_of: Mapping[int, int]) -> dict[str, tuple[int, int]]:
    """For each child of an opaque model its block and its stage."""
    return {
        ".".join(node.meta["module_path"]): (block.index, stage_of.get(block.index, 0))
        for block in graph.blocks
        for node in block.nodes
        if node.meta.get("module_path")
    }
