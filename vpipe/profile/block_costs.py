"""What was measured of a model's kinds of blocks, told block by block: times, bytes, shared parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vpipe.cost import BlockCost, Tie
from vpipe.errors import VPipeError
from vpipe.graph import ModelGraph
from vpipe.profile.bench import Bench
from vpipe.profile.kinds import Shape
from vpipe.profile.times import Times
from vpipe.stage.held import address


class Kept(NamedTuple):
    """What autograd saves in a block of some kind: bytes of its own, and which inputs and outputs are among it.

    `deferred` are the bytes that remain of it and of its gradients for weight gradients that wait, `forward` and
    `backward` those that only lie there while it runs, `updating` those of its update.
    """

    own: int
    inputs: dict[int, int]
    """Number of an input: bytes of its storage."""
    outputs: frozenset[int]
    deferred: int
    forward: int
    backward: int
    updating: int


def kept_in(
    shape: Shape,
    saved: Mapping[int, int],
    known: Mapping[str, Any],
    deferred: int,
    forward: int,
    backward: int,
    updating: int,
) -> Kept:
    left = dict(saved)
    inputs = {}
    for number, name in enumerate(shape.inputs):
        size = left.pop(address(known.get(name)), None)
        if size is not None:
            inputs[number] = size
    outputs = frozenset(i for i, name in enumerate(shape.outputs) if address(known[name]) in saved)
    return Kept(sum(left.values()), inputs, outputs, deferred, forward, backward, updating)


def block_costs(
    graph: ModelGraph, found: list[Shape], times: Mapping[str, Times], kept: Mapping[str, Kept]
) -> tuple[BlockCost, ...]:
    already: set[str] = set()  # values that an earlier block has kept
    costs = []
    for block, shape in zip(graph.blocks, found, strict=True):
        time, memory = times[shape.kind], kept[shape.kind]
        new = {shape.inputs[number]: size for number, size in memory.inputs.items()}
        size = memory.own + sum(size for name, size in new.items() if name not in already)
        already.update(new, (shape.outputs[number] for number in memory.outputs))
        infos = [graph.parameters[name] for name in block.parameters]
        costs.append(
            BlockCost(
                name=block.name,
                forward=time.forward,
                input_gradient=time.input_gradient,
                weight_gradient=time.weight_gradient,
                update=time.update,
                kept_bytes=size,
                boundary_bytes=block.cut_bytes,
                parameter_bytes=sum(info.shape.numel() * info.dtype.itemsize for info in infos),
                spread=time.spread,
                deferred_bytes=memory.deferred,
                version=time.version,
                splitting=time.splitting,
                accumulating=time.accumulating,
                recomputing=time.recomputing,
                split_recomputing=time.split_recomputing,
                swapping=time.swapping,
                working_bytes=max(memory.forward, memory.backward),
                forward_bytes=memory.forward,
                update_bytes=memory.updating,
            )
        )
    return tuple(costs)


def ties(graph: ModelGraph) -> tuple[Tie, ...]:
    """The trained parameters that several blocks use."""
    users: dict[str, list[int]] = defaultdict(list)
    for block in graph.blocks:
        for name in block.parameters:
            users[name].append(block.index)
    return tuple(
        Tie(graph.parameters[name].shape.numel() * graph.parameters[name].dtype.itemsize, tuple(blocks))
        for name, blocks in users.items()
        if len(blocks) > 1 and graph.parameters[name].requires_grad
    )


def optimizer_ratio(benches: Sequence[Bench]) -> float:
    trained = sum(p.nbytes for bench in benches for p in bench.weights.model_parameters)
    if not trained:
        raise VPipeError("the model has no parameter that is trained: there is nothing to profile")
    return round(sum(bench.state_bytes() for bench in benches) / trained, 4)
