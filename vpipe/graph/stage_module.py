"""The module that runs a stage: its own parameters under the model's names, its blocks as functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from vpipe.graph.materialise import materialise
from vpipe.graph.random import RandomContext
from vpipe.graph.segment import Options, Segment, build_segment
from vpipe.graph.trace import Input, Kind

if TYPE_CHECKING:
    from vpipe.graph.blocks import Block
    from vpipe.graph.stages import StageGraph


class StageModule(nn.Module):
    """A stage with parameters. `parameters_by_name` and `buffers_by_name` use the model's own names."""

    def __init__(
        self,
        stage: StageGraph,
        source: nn.Module,
        *,
        recompute: frozenset[int],
        split: bool,
        training: bool,
        device: torch.device | None,
        seed: int,
    ) -> None:
        super().__init__()
        self.stage = stage
        self.training = training
        self.device: torch.device = device or _device_of(source)
        self._constants: dict[str, Tensor]
        if isinstance(source, StageModule):
            self._parameters.update(source._parameters)
            self._buffers.update(source._buffers)
            self._constants = source._constants
        else:
            self._take_tensors(source, seed)
        options = Options(self.device, training, split)
        self._segments = [*_free_segment(stage, options), *_segments(stage, recompute, options)]
        self._graded = tuple(name for name in stage.writes if stage.needs_gradient(name))

    def _take_tensors(self, model: nn.Module, seed: int) -> None:
        stage, device = self.stage, self.device
        tensors = materialise(model, [*stage.parameters, *stage.buffers], seed)
        # nn.Module refuses names with dots in its own setters, but keeps them well.
        for name in stage.parameters:
            trained = name not in stage.trace.frozen
            self._parameters[name] = nn.Parameter(tensors[name].to(device), requires_grad=trained)
        for name in stage.buffers:
            self._buffers[name] = tensors[name].to(device)
        self._constants = {name: tensor.to(device) for name, tensor in stage.trace.constants.items()}

    @property
    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self._parameters.items() if parameter is not None}

    @property
    def buffers_by_name(self) -> dict[str, Tensor]:
        return {name: buffer for name, buffer in self._buffers.items() if buffer is not None}

    def forward(
        self, values: Mapping[str, Tensor], fields: Mapping[str, Tensor], context: RandomContext
    ) -> dict[str, Tensor]:
        """Values that other stages read, by name; `loss` in addition where the stage computes it."""
        known: dict[str, Tensor] = dict(values)
        sources: dict[Kind, Mapping[str, Any]] = {
            Kind.FIELD: fields,
            Kind.PARAMETER: self._parameters,
            Kind.BUFFER: self._buffers,
            Kind.CONSTANT: self._constants,
        }
        for segment in self._segments:
            arguments = [
                sources[origin.kind][origin.name] if isinstance(origin, Input) else known[origin]
                for origin in segment.inputs
            ]
            run = _recomputed if segment.recompute and torch.is_grad_enabled() else _plain
            known.update(zip(segment.outputs, run(segment, context, arguments), strict=True))
        results = {name: known[name] for name in self.stage.writes}
        if torch.is_grad_enabled():
            for name in self._graded:
                if not results[name].requires_grad:
                    # Readers send a gradient for it: let it end here.
                    results[name] = results[name].detach().requires_grad_()
        if self.stage.is_criterion:
            results["loss"] = known["loss"]
        return results


def _device_of(source: nn.Module) -> torch.device:
    return source.device if isinstance(source, StageModule) else torch.device("cpu")


def _plain(segment: Segment, context: RandomContext, arguments: list[Tensor]) -> tuple[Tensor, ...]:
    return segment.function(context, *arguments)


def _recomputed(segment: Segment, context: RandomContext, arguments: list[Tensor]) -> tuple[Tensor, ...]:
    """Run without keeping activations; the second run sees buffers as they were and leaves them alone.

    Only values go through the checkpoint's own arguments: it would refuse a buffer that changes meanwhile.
    """
    before = {position: arguments[position].clone() for position in segment.mutated}
    values = [position for position, origin in enumerate(segment.inputs) if not isinstance(origin, Input)]
    state = [None if position in values else argument for position, argument in enumerate(arguments)]
    runs = 0

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        nonlocal runs
        runs += 1
        inputs = list(state)
        for position, value in zip(values, given, strict=True):
            inputs[position] = value
        for position, value in before.items() if runs > 1 else ():
            inputs[position] = value.clone()
        return segment.function(context, *inputs)

    given = [arguments[position] for position in values]
    call: Callable[..., tuple[Tensor, ...]] = checkpoint
    return call(run, *given, use_reentrant=False, preserve_rng_state=False, determinism_check="none")


def _free_segment(stage: StageGraph, options: Options) -> list[Segment]:
    """One segment for all free operations of the stage, run before its blocks."""
    own = [node for block in stage.owned for node in block.nodes]
    free = set(stage.free)
    outputs = [
        node
        for node in dict.fromkeys(arg for op in own for arg in op.all_input_nodes)
        if node in free and node.op != "get_attr"
    ]
    if not outputs:
        return []
    return [build_segment(stage.trace, [(None, stage.free)], outputs, stage.ownership.clusters, options)]


def _segments(stage: StageGraph, recompute: frozenset[int], options: Options) -> list[Segment]:
    """Runs of kept blocks together, each recomputed block alone."""
    groups: list[list[Block]] = []
    for block in stage.owned:
        joins = groups and block.index not in recompute and groups[-1][-1].index not in recompute
        if joins:
            groups[-1].append(block)
        else:
            groups.append([block])
    return [
        build_segment(
            stage.trace,
            [(block.index, block.nodes) for block in group],
            _outputs(stage, group),
            stage.ownership.clusters,
            options,
            recompute=group[0].index in recompute,
        )
        for group in groups
    ]


def _outputs(stage: StageGraph, group: Iterable[Block]) -> list[fx.Node]:
    """What later segments or other stages read, and the loss."""
    own = [node for block in group for node in block.nodes]
    inside = set(own)
    return [
        node
        for node in own
        if node is stage.trace.loss or any(user.op != "output" and user not in inside for user in node.users)
    ]
