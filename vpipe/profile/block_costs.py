"""The costs of each block from the measurements of its kind: times, bytes, shared parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from vpipe.cost import BlockCost, Tie
from vpipe.errors import VPipeError
from vpipe.graph import ModelGraph, TensorInfo, tied
from vpipe.profile.kinds import Shape
from vpipe.profile.measured_stage import MeasuredStage
from vpipe.profile.rounds import BlockTimes
from vpipe.stage.held import address


class Kept(NamedTuple):
    """Bytes that autograd saves in a block of some kind: its own, and which inputs and outputs are among them.

    `deferred` remain of these and of gradients for deferred weight gradients; `forward`, `backward` and `updating` are
    allocated and freed again while it runs and is updated.
    """

    own: int
    inputs: dict[int, int]
    """Number of an input: bytes of its storage."""
    outputs: frozenset[int]
    deferred: int
    forward: int
    backward: int
    updating: int

    @property
    def all(self) -> int:
        return self.own + sum(self.inputs.values())


def measure_kept(
    shape: Shape, measured: MeasuredStage, saved: Mapping[int, int], made: Mapping[str, Tensor]
) -> Kept:
    """Of a block, its `saved` bytes by address, and the values that it has `made`."""
    known: dict[str, Any] = {**measured.inputs, **measured.free, **made}
    left = dict(saved)
    inputs = {}
    for number, name in enumerate(shape.inputs):
        size = left.pop(address(known.get(name)), None)
        if size is not None:
            inputs[number] = size
    outputs = frozenset(i for i, name in enumerate(shape.outputs) if address(known[name]) in saved)
    deferred, (forward, backward) = measured.deferred_bytes(), measured.working_bytes()
    return Kept(sum(left.values()), inputs, outputs, deferred, forward, backward, measured.update_bytes())


def block_costs(
    graph: ModelGraph,
    found: list[Shape],
    times: Mapping[str, BlockTimes],
    kept: Mapping[str, Kept],
    fields: Mapping[str, Tensor],
) -> tuple[BlockCost, ...]:
    """`fields` are those of the minibatch that was measured."""
    already: set[str] = set()  # values that an earlier block has kept
    costs = []
    for block, shape, crossing in zip(graph.blocks, found, _crossing_bytes(graph, fields), strict=True):
        memory = kept[shape.kind]
        new = {shape.inputs[number]: size for number, size in memory.inputs.items()}
        size = memory.own + sum(size for name, size in new.items() if name not in already)
        already.update(new, (shape.outputs[number] for number in memory.outputs))
        costs.append(
            BlockCost(
                name=block.name,
                kept_bytes=size,
                boundary_bytes=crossing,
                parameter_bytes=sum(_bytes(graph.parameters[name]) for name in block.parameters),
                deferred_bytes=memory.deferred,
                working_bytes=max(memory.forward, memory.backward),
                forward_bytes=memory.forward,
                update_bytes=memory.updating,
                **times[shape.kind]._asdict(),
            )
        )
    return tuple(costs)


def _crossing_bytes(graph: ModelGraph, fields: Mapping[str, Tensor]) -> list[int]:
    """The bytes that cross the cut behind each block, with a minibatch of these fields."""
    shapes = {name: tensor.shape for name, tensor in fields.items()}
    crossing = [0] * len(graph.blocks)
    for stage in graph.stages((1,) * len(graph.blocks)):
        for value, readers in stage.writes.items():
            size = graph.shape(value, shapes).numel() * stage.value_dtype(value).itemsize
            for cut in range(stage.index, readers[-1]):
                crossing[cut] += size
    return crossing


def ties(graph: ModelGraph) -> tuple[Tie, ...]:
    """The trained parameters that several blocks use."""
    users = tied(graph.stages((1,) * len(graph.blocks)))
    return tuple(
        Tie(_bytes(graph.parameters[name]), blocks)
        for name, blocks in users.items()
        if graph.parameters[name].requires_grad
    )


def _bytes(parameter: TensorInfo) -> int:
    return parameter.shape.numel() * parameter.dtype.itemsize


def optimizer_ratio(stages: Sequence[MeasuredStage]) -> float:
    trained = sum(p.nbytes for stage in stages for p in stage.weights.model_parameters)
    if not trained:
        raise VPipeError("the model has no parameter that is trained: there is nothing to profile")
    return round(sum(stage.state_bytes() for stage in stages) / trained, 4)
