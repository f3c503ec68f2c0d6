"""The module of a stage: its parameters under the model's names, its blocks as functions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn

from vpipe.graph import Block, StageGraph
from vpipe.graph.materialise import materialise
from vpipe.graph.trace import Input, Kind
from vpipe.stage.held import HeldSaver, address
from vpipe.stage.policies import KEEP, RUNS, SWAP, SegmentCall
from vpipe.stage.random import RandomContext
from vpipe.stage.segment import Options, Segment, build_segment


class StageModule(nn.Module):
    """A stage with parameters. `parameters_by_name` and `buffers_by_name` use the model's own names.

    `source` is the model (its values are copied; those on `meta` are initialised here, from `seed`) or another
    StageModule of this stage, whose tensors are then shared. `policies` are the memory policies (`RUNS`) of blocks by
    their indices in the model; the others are kept. Activations are swapped by `context.swap`. `split=True` defers
    weight gradients to `context.deferred`; `compile` names a backend of torch.compile; `training=False` turns dropout
    off and uses running statistics; `keep_output` returns what the model's output is made of, too. `device` is the cpu
    by default, or the other StageModule's.
    """

    def __init__(
        self,
        stage: StageGraph,
        source: nn.Module,
        *,
        policies: Mapping[int, str] = MappingProxyType({}),
        split: bool = False,
        compile: str | None = None,
        training: bool = True,
        keep_output: bool = False,
        device: torch.device | str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.stage = stage
        self.training = training
        if device is None:
            device = source.device if isinstance(source, StageModule) else "cpu"
        self.device: torch.device = torch.device(device)
        self._constants: dict[str, Tensor]
        if isinstance(source, StageModule):
            self._parameters.update(source._parameters)
            self._buffers.update(source._buffers)
            self._constants = source._constants
        else:
            self._take_tensors(source, seed)
        self._free = _free_segment(stage, Options(self.device, training, split))
        options = Options(self.device, training, split, compile)
        output = stage.trace.output
        own = {node for block in stage.owned for node in block.nodes}
        kept = [node for node in output.values if node in own] if output is not None and keep_output else []
        self._kept = ["loss" if node is stage.trace.loss else node.name for node in kept]
        self._segments = _segments(stage, policies if training else {}, options, kept)
        self.swaps = any(segment.policy == SWAP for segment in self._segments)
        self.splits = split
        self.compiles = compile is not None
        self._graded = tuple(name for name in stage.writes if stage.needs_gradient(name))

    def _take_tensors(self, model: nn.Module, seed: int) -> None:
        stage, device = self.stage, self.device
        tensors = materialise(model, [*stage.parameters, *stage.buffers], seed, device)
        # nn.Module refuses names with dots in its own setters only.
        for name in stage.parameters:
            trained = name not in stage.trace.frozen
            self._parameters[name] = nn.Parameter(tensors[name], requires_grad=trained)
        for name in stage.buffers:
            self._buffers[name] = tensors[name]
        self._constants = {name: tensor.to(device) for name, tensor in stage.trace.constants.items()}

    @property
    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self._parameters.items() if parameter is not None}

    @property
    def buffers_by_name(self) -> dict[str, Tensor]:
        return {name: buffer for name, buffer in self._buffers.items() if buffer is not None}

    @property
    def tensors_by_name(self) -> dict[str, Tensor]:
        """Parameters and buffers."""
        return {**self.parameters_by_name, **self.buffers_by_name}

    @property
    def blocks_that_draw(self) -> list[int]:
        """Those with random operations: they seed the generators."""
        graphs = [segment.function.graph for segment in self._segments]
        return [node.args[1] for g in graphs for node in g.find_nodes(op="call_method", target="seed_block")]

    @contextmanager
    def reading(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """Read these parameters in place of the module's own of the same names."""
        own = self._parameters
        self._parameters = {**own, **parameters}
        try:
            yield
        finally:
            self._parameters = own

    def forward(
        self, values: Mapping[str, Tensor], fields: Mapping[str, Tensor], context: RandomContext
    ) -> dict[str, Tensor]:
        """Values that other stages read, by name; `loss` in addition where the stage computes it."""
        return self.run_blocks({**values, **self.free_values(fields, context)}, fields, context)

    def free_values(self, fields: Mapping[str, Tensor], context: RandomContext) -> dict[str, Tensor]:
        """The values that the stage computes for itself from the batch alone."""
        if self._free is None:
            return {}
        arguments = _arguments(self._free, self._sources(fields), {})
        return dict(zip(self._free.outputs, self._free.function.forward(context, *arguments), strict=True))

    def run_blocks(
        self, known: dict[str, Tensor], fields: Mapping[str, Tensor], context: RandomContext
    ) -> dict[str, Tensor]:
        """`forward`, given the values of other stages and the free ones."""
        sources = self._sources(fields)
        graded = torch.is_grad_enabled()
        watched = graded and (context.held is not None or (context.swap is not None and self.swaps))
        saver = HeldSaver(context.held, self._permanent(fields) if watched else ())
        inputs = {address(known[name]) for name in self.stage.reads} if context.swap else ()
        for segment in self._segments:
            arguments = _arguments(segment, sources, known)
            if graded:
                made = RUNS[segment.policy].run(SegmentCall(segment, context, arguments, saver, inputs))
            else:
                made = segment.function.forward(context, *arguments)
            known.update(zip(segment.outputs, made, strict=True))
        results = {name: known[name] for name in self.stage.writes}
        if graded:
            for name in self._graded:
                if not results[name].requires_grad:
                    # Readers send a gradient for it, which ends here.
                    results[name] = results[name].detach().requires_grad_()
        results |= {name: known[name] for name in self._kept}
        if self.stage.is_criterion:
            results["loss"] = known["loss"]
        return results

    def _sources(self, fields: Mapping[str, Tensor]) -> dict[Kind, Mapping[str, Any]]:
        return {
            Kind.FIELD: fields,
            Kind.PARAMETER: self._parameters,
            Kind.BUFFER: self._buffers,
            Kind.CONSTANT: self._constants,
        }

    def _permanent(self, fields: Mapping[str, Tensor]) -> set[int]:
        """Addresses of storages that no minibatch holds: parameters, buffers, constants; and those of the raw batch."""
        return {address(t) for tensors in self._sources(fields).values() for t in tensors.values()}


def _arguments(
    segment: Segment, sources: Mapping[Kind, Mapping[str, Any]], known: Mapping[str, Tensor]
) -> list[Tensor]:
    return [
        sources[origin.kind][origin.name] if isinstance(origin, Input) else known[origin]
        for origin in segment.inputs
    ]


def _free_segment(stage: StageGraph, options: Options) -> Segment | None:
    """One segment for all free operations of the stage, run before its blocks."""
    own = [node for block in stage.owned for node in block.nodes]
    free = set(stage.free)
    outputs = [
        node
        for node in dict.fromkeys(arg for op in own for arg in op.all_input_nodes)
        if node in free and node.op != "get_attr"
    ]
    if not outputs:
        return None
    return build_segment(stage, [(None, stage.free)], outputs, options)


def _segments(
    stage: StageGraph, policies: Mapping[int, str], options: Options, kept: Collection[fx.Node]
) -> list[Segment]:
    """Neighbouring blocks of one policy together, unless it wants each alone."""

    def kind(block: Block) -> tuple[str, int | None]:
        policy = policies.get(block.index, KEEP)
        return policy, block.index if RUNS[policy].alone else None

    groups = [(policy, list(group)) for (policy, _), group in groupby(stage.owned, kind)]
    return [
        build_segment(
            stage,
            [(block.index, block.nodes) for block in group],
            _outputs(stage, group, kept),
            options,
            policy,
        )
        for policy, group in groups
    ]


def _outputs(stage: StageGraph, group: Iterable[Block], kept: Collection[fx.Node]) -> list[fx.Node]:
    """What later segments or other stages read, the loss, and what is kept."""
    own = [node for block in group for node in block.nodes]
    inside = set(own)
    return [
        node
        for node in own
        if node is stage.trace.loss
        or node in kept
        or any(user.op != "output" and user not in inside for user in node.users)
    ]
