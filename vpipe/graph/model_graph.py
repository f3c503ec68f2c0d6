"""The captured model: blocks, parameters, and the stages of a partition."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from vpipe.graph.batch import Batch, FieldCheck
from vpipe.graph.blocks import Block, count_flops, find_blocks
from vpipe.graph.exported import canonical_names
from vpipe.graph.inplace import operator_name
from vpipe.graph.ownership import Ownership
from vpipe.graph.partition import balanced_partition, check_partition, partition_for_ranks
from vpipe.graph.stages import StageGraph, cut_into_stages
from vpipe.graph.trace import Trace, evaluate, submodules


class TensorInfo(NamedTuple):
    """A parameter or buffer; `aliases` are the other names of a tied one."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    aliases: tuple[str, ...]
    persistent: bool


class ModelGraph:
    """A model that can be cut into stages; holds no parameter values."""

    def __init__(self, model: nn.Module, trace: Trace, check: FieldCheck) -> None:
        self.parameters, self.buffers = _tensor_infos(model)
        trace.frozen = frozenset(name for name, info in self.parameters.items() if not info.requires_grad)
        self.trace = trace
        self.check = check
        self.fields = check.layout.names
        self.ownership = Ownership(trace)
        self.blocks = find_blocks(trace, self.ownership)
        self.fingerprint = _fingerprint(trace, self.blocks, self.parameters)
        self._specs = {node.name: trace.specs[node] for node in self.ownership.owned if node in trace.specs}
        self._shapes: dict[tuple[Any, ...], torch.Size] = {}

    @cached_property
    def plan_fingerprint(self) -> str:
        """Hash of the blocks and their parameters, to which a plan refers; the same for any batch and precision."""
        lines = [f"{name} {tuple(info.shape)}" for name, info in self.parameters.items()]
        lines += [f"{block.name} {' '.join(block.parameters)}" for block in self.blocks]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def batch_fields(self, batch: Batch) -> dict[str, Tensor]:
        """The batch's tensors by field. BatchError names the wrong field, its value and the expected one."""
        return self.check(batch)

    def balanced_partition(self, stages: int) -> tuple[int, ...]:
        """Numbers of blocks that make the heaviest stage as light as possible."""
        return balanced_partition([block.weight.eager for block in self.blocks], stages, self._uncut)

    def partition_for_ranks(
        self, placement: Sequence[Sequence[int]], *, compiled: bool = False, cpu: bool = False
    ) -> tuple[int, ...]:
        """Numbers of blocks that make the busiest rank's work as small as possible; `placement`: each stage's ranks."""
        kind = "cpu" if cpu else "compiled" if compiled else "eager"
        weights = [getattr(block.weight, kind) for block in self.blocks]
        return partition_for_ranks(weights, placement, self._uncut)

    @property
    def _uncut(self) -> str:
        """What may have made one block of several layers, for an error."""
        wrapped = (node for node in self.trace.nodes() if count_flops(node, self.trace))
        if any(submodules(node, self.trace.root) for node in wrapped):
            return (
                "; what is computed inside torch.autocast or torch.no_grad is one operation of the graph: use the"
                " argument precision instead of torch.autocast"
            )
        return ""

    def stages(self, partition: Sequence[int]) -> tuple[StageGraph, ...]:
        """The stages of a partition, which gives the number of consecutive blocks of each."""
        check_partition(partition, len(self.blocks))
        return cut_into_stages(self.trace, self.ownership, self.blocks, partition, list(self.parameters))

    def shape(self, value: str, fields: Mapping[str, torch.Size]) -> torch.Size:
        """Shape of a value between stages, from the shapes of the batch's fields: it is sent without a header."""
        key = (value, *(fields[name] for name in self.check.layout.tensors))
        if key not in self._shapes:
            sizes = self.check.sizes(fields)
            self._shapes[key] = torch.Size(evaluate(size, sizes) for size in self._specs[value].shape)
        return self._shapes[key]


def _tensor_infos(model: nn.Module) -> tuple[dict[str, TensorInfo], dict[str, TensorInfo]]:
    canonical = canonical_names(model)
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }

    def info(name: str, tensor: Tensor) -> TensorInfo:
        aliases = tuple(other for other, first in canonical.items() if first == name and other != name)
        return TensorInfo(tensor.shape, tensor.dtype, tensor.requires_grad, aliases, name not in transient)

    parameters = {name: info(name, tensor) for name, tensor in model.named_parameters()}
    buffers = {name: info(name, tensor) for name, tensor in model.named_buffers()}
    return parameters, buffers


def _fingerprint(trace: Trace, blocks: Sequence[Block], parameters: Mapping[str, TensorInfo]) -> str:
    """Hash of the structure: equal on every rank for equal models, whatever their device and values."""
    number: dict[fx.Node, int] = {}
    kept: list[fx.Node] = []
    for node in trace.graph.nodes:
        # Left out: whether there is one depends on the device's kernels.
        if operator_name(node) == "contiguous":
            number[node] = number[node.args[0]]
        else:
            number[node] = len(kept)
            kept.append(node)

    def text(argument: Any) -> str:
        if isinstance(argument, fx.Node):
            return f"%{number[argument]}"
        if isinstance(argument, torch.device):
            return "device"
        if isinstance(argument, list | tuple):
            return "[" + ",".join(map(text, argument)) + "]"
        return repr(argument)

    lines = [
        f"{trace.inputs[node].kind.value} {trace.inputs[node].name}"
        if node in trace.inputs
        else f"{node.target} {text(node.args)} {[(k, text(v)) for k, v in sorted(node.kwargs.items())]}"
        for node in kept
    ]
    lines += [f"{name} {tuple(i.shape)} {i.dtype} {i.requires_grad}" for name, i in parameters.items()]
    lines += [f"{block.name} {block.flops}" for block in blocks]
    lines += [f"{head.loss.name} in pieces" for head in trace.heads]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
