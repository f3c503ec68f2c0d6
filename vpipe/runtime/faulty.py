"""Faults in the middle of a program, as `VPIPE_FAULT` asks for: wrappers around the operations of a rank.

Without a fault for this rank the table stays as it is, so an ordinary run pays nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from vpipe.schedule import Op
from vpipe.system.faults import wanted

if TYPE_CHECKING:
    from vpipe.runtime.feed import Minibatch
    from vpipe.runtime.stage_runtime import StageRuntime
    from vpipe.stage.stage import Stage

Method = Callable[["Stage", "Minibatch"], None]

_POINTS = {
    Op.RECV_F: "fwd_recv",
    Op.F: "fwd",
    Op.SEND_F: "fwd_send",
    Op.RECV_B: "bwd_recv",
    Op.B: "bwd",
    Op.I: "bwd",
    Op.SEND_B: "bwd_send",
    Op.REDUCE: "reduce",
    Op.STEP: "step",
}


def with_faults(
    runtime: StageRuntime, methods: dict[Op, Method], *, evaluation: bool = False
) -> dict[Op, Method]:
    """The same table, unless a fault is wanted on this rank."""
    faults = wanted(runtime.rank)
    if not faults:
        return methods
    points = {Op.F: "eval"} if evaluation else _POINTS

    def run(op: Op, stage: Stage, minibatch: Minibatch) -> None:
        poison = False
        for fault in faults:
            update = fault.reached if evaluation else minibatch.update
            if fault.fits(points.get(op, ""), update, minibatch.number):
                poison |= fault.kind == "nan"
                fault.strike()
        if poison:
            _poison(_tensors_of(runtime, op, stage, minibatch.number))
        methods[op](stage, minibatch)
        if poison:
            _poison(_tensors_of(runtime, op, stage, minibatch.number))
        if op is Op.STEP:
            for fault in faults:
                fault.reached = minibatch.update + 1

    return {op: partial(run, op) for op in methods}


def _tensors_of(runtime: StageRuntime, op: Op, stage: Stage, minibatch: int) -> Iterable[Tensor]:
    """The tensors that the operation will read, or, once it has run, has made."""
    if op in (Op.B, Op.I, Op.REDUCE, Op.STEP):
        parameters = stage.optimizer.model_parameters
        return [parameter.grad for parameter in parameters if parameter.grad is not None]
    if op is Op.RECV_B:
        arrived = stage.in_flight[minibatch].gradients.values()
        return [gradient for by_reader in arrived for gradient in by_reader.values()]
    here = (one.arrived.get(minibatch, {}) for one in runtime.stages.values())
    unsent = runtime.unsent.get((stage.index, minibatch), {})
    return [tensor for values in (*here, unsent) for tensor in values.values()]


def _poison(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.data.fill_(float("nan"))
