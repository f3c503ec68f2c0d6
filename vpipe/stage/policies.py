"""The way a stage runs a segment under each memory policy; `vpipe/cost/policies.py` says what each costs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from torch import Tensor

from vpipe.stage.held import HeldSaver
from vpipe.stage.random import RandomContext
from vpipe.stage.recompute import run_recomputed
from vpipe.stage.segment import Segment


class SegmentCall(NamedTuple):
    """A segment with what its forward needs."""

    segment: Segment
    context: RandomContext
    arguments: list[Any]
    saver: HeldSaver
    """Counts what autograd saves."""
    inputs: Collection[int]
    """Addresses of the stage's inputs."""

    def forward(self) -> tuple[Tensor, ...]:
        made: tuple[Tensor, ...] = self.segment.function.forward(self.context, *self.arguments)
        return made


class PolicyRun(NamedTuple):
    run: Callable[[SegmentCall], tuple[Tensor, ...]]
    alone: bool = False
    """Whether each block is a segment of its own; otherwise neighbours with this policy are one."""


def run_kept(call: SegmentCall) -> tuple[Tensor, ...]:
    if call.context.held is None:
        return call.forward()
    with call.saver.saving():
        return call.forward()


def run_swapped(call: SegmentCall) -> tuple[Tensor, ...]:
    if call.context.swap is None:
        return run_kept(call)
    with call.context.swap.saving(call.saver, call.inputs):
        return call.forward()


KEEP, SWAP = "keep", "swap"
RUNS: dict[str, PolicyRun] = {
    KEEP: PolicyRun(run_kept),
    "recompute": PolicyRun(
        lambda call: run_recomputed(call.segment, call.context, call.arguments, call.saver), alone=True
    ),
    SWAP: PolicyRun(run_swapped),
}
