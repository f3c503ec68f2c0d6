"""The way a stage runs a segment under each memory policy; `vpipe/cost/policies.py` says what each costs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from torch import Tensor

from vpipe.stage.held import HeldSaver
from vpipe.stage.random import RandomContext
from vpipe.stage.recompute import run_recomputed
from vpipe.stage.segment import Segment

Run = Callable[[Segment, RandomContext, list[Tensor], HeldSaver, Collection[int]], tuple[Tensor, ...]]
"""`saver` counts what autograd saves; the addresses of the stage's inputs come last."""


class PolicyRun(NamedTuple):
    run: Run
    alone: bool = False
    """Whether each block is a segment of its own; otherwise neighbours with this policy are one."""


def run_kept(
    segment: Segment,
    context: RandomContext,
    arguments: list[Tensor],
    saver: HeldSaver,
    inputs: Collection[int],
) -> tuple[Tensor, ...]:
    if context.held is None:
        return segment.function.forward(context, *arguments)
    with saver.saving():
        return segment.function.forward(context, *arguments)


def run_swapped(
    segment: Segment,
    context: RandomContext,
    arguments: list[Tensor],
    saver: HeldSaver,
    inputs: Collection[int],
) -> tuple[Tensor, ...]:
    if context.swap is None:
        return run_kept(segment, context, arguments, saver, inputs)
    with context.swap.saving(saver, inputs):
        return segment.function.forward(context, *arguments)


KEEP, SWAP = "keep", "swap"
RUNS: dict[str, PolicyRun] = {
    KEEP: PolicyRun(run_kept),
    "recompute": PolicyRun(
        lambda segment, context, arguments, saver, inputs: run_recomputed(segment, context, arguments, saver),
        alone=True,
    ),
    SWAP: PolicyRun(run_swapped),
}
