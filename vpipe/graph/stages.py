"""Stages of a partition as data: the values that each reads and writes, its blocks and parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import fx

from vpipe.graph.blocks import Block
from vpipe.graph.ownership import Ownership
from vpipe.graph.trace import Kind, Trace


@dataclass(frozen=True, eq=False)
class StageGraph:
    """One stage of a partition.

    `fields` are the batch's fields that it reads, `reads` the values from other stages (name to producer), `writes`
    the values for other stages (name to readers), `parameters` and `buffers` what it holds, by the model's own names.
    """

    index: int
    fields: tuple[str, ...]
    reads: Mapping[str, int]
    writes: Mapping[str, tuple[int, ...]]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    is_criterion: bool
    owned: tuple[Block, ...] = field(repr=False)
    free: tuple[fx.Node, ...] = field(repr=False)
    trace: Trace = field(repr=False)
    ownership: Ownership = field(repr=False)
    _nodes: Mapping[str, fx.Node] = field(repr=False)

    @property
    def blocks(self) -> range:
        """The indices of its blocks in the model."""
        return range(self.owned[0].index, self.owned[-1].index + 1)

    def value_dtype(self, value: str) -> torch.dtype:
        """Type of a value that the stage reads or writes."""
        return self.trace.specs[self._nodes[value]].dtype

    def needs_gradient(self, value: str) -> bool:
        """Whether the value has a gradient: it is floating and depends on a trained parameter."""
        return self._nodes[value] in self.ownership.differentiable


def cut_into_stages(
    trace: Trace,
    ownership: Ownership,
    blocks: Sequence[Block],
    partition: Sequence[int],
    parameter_order: Sequence[str],
) -> tuple[StageGraph, ...]:
    ends = list(accumulate(partition))
    spans = [tuple(blocks[end - count : end]) for end, count in zip(ends, partition, strict=True)]
    nodes = [[node for block in span for node in block.nodes] for span in spans]
    stage_of = {node: stage for stage, own in enumerate(nodes) for node in own}
    readers: dict[fx.Node, list[int]] = {}
    for node, stage in stage_of.items():
        others = {stage_of[user] for user in node.users if user in stage_of} - {stage}
        if others:
            readers[node] = sorted(others)
    stages = []
    for index, (span, own) in enumerate(zip(spans, nodes, strict=True)):
        free = _free_operations(trace, ownership, own)
        inputs = [arg for node in [*own, *free] for arg in node.all_input_nodes if arg in trace.inputs]
        names = {kind: {trace.inputs[n].name for n in inputs if trace.kind(n) is kind} for kind in Kind}
        stages.append(
            StageGraph(
                index=index,
                fields=tuple(sorted(names[Kind.FIELD])),
                reads={node.name: stage_of[node] for node in readers if index in readers[node]},
                writes={node.name: tuple(readers[node]) for node in readers if stage_of[node] == index},
                parameters=tuple(name for name in parameter_order if name in names[Kind.PARAMETER]),
                buffers=tuple(sorted(names[Kind.BUFFER])),
                is_criterion=stage_of[trace.loss] == index,
                owned=span,
                free=tuple(free),
                trace=trace,
                ownership=ownership,
                _nodes={node.name: node for node in readers},
            )
        )
    return tuple(stages)


def _free_operations(trace: Trace, ownership: Ownership, own: Iterable[fx.Node]) -> list[fx.Node]:
    """The free operations that the stage has to repeat, in order, writes into free storage included."""
    owned = set(ownership.owned)
    needed: set[fx.Node] = set()
    pending = [arg for node in own for arg in node.all_input_nodes]
    while pending:
        node = pending.pop()
        if node in needed or node in owned or node in trace.inputs:
            continue
        needed.add(node)
        pending += node.all_input_nodes
        pending += ownership.clusters[node].writes
    return [node for node in trace.nodes() if node in needed]


def edges(stages: Sequence[StageGraph]) -> set[tuple[int, int]]:
    """Pairs (producer, reader) of stages between which a value travels."""
    return {(producer, stage.index) for stage in stages for producer in stage.reads.values()}


def tied(stages: Sequence[StageGraph]) -> dict[str, tuple[int, ...]]:
    """Parameters that more than one stage holds, with those stages."""
    holders: dict[str, list[int]] = {}
    for stage in stages:
        for name in stage.parameters:
            holders.setdefault(name, []).append(stage.index)
    return {name: tuple(where) for name, where in holders.items() if len(where) > 1}
