"""What one stage costs: the sums over its blocks, after what the plan does with each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from vpipe.cost import KEEP, RECOMPUTE, SWAP, BlockCost, Plan, Profile
from vpipe.schedule import Op


@dataclass(frozen=True)
class StageCost:
    """Times of one minibatch (the update's: of one update), bytes of one minibatch in flight."""

    forward: float
    input_gradient: float
    """With the forward again of what is recomputed."""
    weight_gradient: float
    update: float
    held: int
    """On the device from F to the end of backward: what is kept, and the inputs of what is recomputed."""
    recomputed: int
    """What recomputing makes again: W still reads all of it after a separate I."""
    largest_recomputed: int
    """A whole backward recomputes, uses and drops one block after the other."""
    swapped: int
    """On the host between F and backward."""
    parameters: int
    received: int
    sent: int
    """Across the cuts before and behind the stage; gradients are as large."""

    @property
    def seconds(self) -> dict[Op, float]:
        backward = self.input_gradient + self.weight_gradient
        parts = {Op.F: self.forward, Op.I: self.input_gradient, Op.W: self.weight_gradient, Op.B: backward}
        return dict.fromkeys(Op, 0.0) | parts | {Op.STEP: self.update}


def stage_costs(profile: Profile, plan: Plan) -> list[StageCost]:
    ends = list(accumulate(plan.partition))
    return [
        stage_cost(profile.blocks, end - count, end, policies)
        for count, end, policies in zip(plan.partition, ends, plan.stage_policies(), strict=True)
    ]


def stage_cost(blocks: Sequence[BlockCost], start: int, stop: int, policies: Sequence[str]) -> StageCost:
    """The stage of the blocks from `start` up to `stop`."""
    own = blocks[start:stop]
    kept: dict[str, list[BlockCost]] = {KEEP: [], RECOMPUTE: [], SWAP: []}
    inputs = 0
    for number, policy in enumerate(policies, start):
        kept[policy].append(blocks[number])
        inputs += input_bytes(blocks, number) if policy == RECOMPUTE else 0
    again = kept[RECOMPUTE]
    return StageCost(
        forward=sum(block.forward for block in own),
        input_gradient=sum(block.input_gradient for block in own) + sum(block.forward for block in again),
        weight_gradient=sum(block.weight_gradient for block in own),
        update=sum(block.update for block in own),
        held=sum(block.kept_bytes for block in kept[KEEP]) + inputs,
        recomputed=sum(block.kept_bytes for block in again),
        largest_recomputed=max((block.kept_bytes for block in again), default=0),
        swapped=sum(block.kept_bytes for block in kept[SWAP]),
        parameters=sum(block.parameter_bytes for block in own),
        received=input_bytes(blocks, start),
        sent=own[-1].boundary_bytes if stop < len(blocks) else 0,
    )


def input_bytes(blocks: Sequence[BlockCost], number: int) -> int:
    """What a block reads of the one before it; the model's first reads the batch, which is not counted."""
    return blocks[number - 1].boundary_bytes if number else 0
