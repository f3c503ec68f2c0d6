"""The cost of a stage: sums over its blocks, each under its memory policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from vpipe.cost import (
    POLICIES,
    BlockCost,
    HostCost,
    MemoryPolicy,
    Plan,
    Profile,
    backward_bytes,
    forward_bytes,
    input_bytes,
    update_bytes,
)
from vpipe.schedule import Op


@dataclass(frozen=True)
class StageCost:
    """Times of one minibatch (the update's: of one update), bytes of one minibatch in flight."""

    blocks: tuple[int, int]
    """The first, and the one behind the last."""
    seconds: dict[Op, float]
    """Backward with what the policies add; each but the update with the runtime's overhead."""
    version: float
    """What an update takes more if the old weights are still read."""
    launching: float
    """The host's time for a minibatch; 0 if it is not known."""
    launching_update: float
    held: int
    """On the device from F to the end of B or I: what is kept, and the inputs of what is recomputed."""
    passing: int
    """What F needs beyond that, in a CUDA graph."""
    whole_backward: int
    input_backward: int
    """What B, or I, needs beyond what the minibatch holds: mostly what a block makes again."""
    backward_gradients: int
    """What B needs more at its worst moment where gradients are fresh: those that it has made by then."""
    deferred: int
    """On the device from the end of I to the end of W."""
    swapped: int
    """On the host between F and backward."""
    parameters: int
    fresh: bool
    """Whether gradients come with each backward and go with the update behind it; else they are always there."""
    updating: int
    """What an update needs beyond its gradients."""
    received: int
    sent: int
    """Across the cuts before and behind the stage; gradients are as large."""
    exchanged: int
    """Gradients of parameters that it shares with other stages, for each update."""


def stage_costs(profile: Profile, plan: Plan, fresh: bool) -> list[StageCost]:
    ends = list(accumulate(plan.partition))
    return [
        stage_cost(profile, end - count, end, policies, fresh)
        for count, end, policies in zip(plan.partition, ends, plan.stage_policies(), strict=True)
    ]


def stage_cost(profile: Profile, start: int, stop: int, policies: Sequence[str], fresh: bool) -> StageCost:
    """The stage of the blocks from `start` up to `stop`."""
    blocks = profile.blocks
    own = blocks[start:stop]
    chosen = [POLICIES[name] for name in policies]
    held = sum(policy.held(blocks[n], input_bytes(blocks, n)) for n, policy in enumerate(chosen, start))
    copied = sum(policy.copied(block) for policy, block in zip(chosen, own, strict=True))
    longer = sum(policy.seconds(block) for policy, block in zip(chosen, own, strict=True))
    input_gradient = sum(block.input_gradient for block in own) + longer
    weight_gradient = sum(block.weight_gradient for block in own)
    overhead = profile.device.overhead
    backward = backward_bytes(profile, start, policies)
    launching, launching_update = _launching(profile, own, chosen)
    return StageCost(
        blocks=(start, stop),
        seconds={
            Op.F: sum(block.forward for block in own) + overhead,
            Op.I: input_gradient + overhead,
            Op.W: weight_gradient + overhead,
            Op.B: input_gradient + weight_gradient + overhead,
            Op.STEP: sum(block.update for block in own),
        },
        version=sum(block.version for block in own),
        launching=launching,
        launching_update=launching_update,
        held=held - copied,
        passing=forward_bytes(profile, start, policies),
        whole_backward=backward,
        input_backward=backward_bytes(profile, start, policies, split=True),
        backward_gradients=backward_bytes(profile, start, policies, fresh=fresh) - backward,
        deferred=sum(block.deferred for block in own),
        swapped=copied,
        parameters=profile.parameter_bytes(start, stop),
        fresh=fresh,
        updating=update_bytes(own),
        received=input_bytes(blocks, start),
        sent=own[-1].boundary_bytes if stop < len(blocks) else 0,
        exchanged=profile.exchanged_bytes(start, stop),
    )


def _launching(
    profile: Profile, own: Sequence[BlockCost], chosen: Sequence[MemoryPolicy]
) -> tuple[float, float]:
    """Of a minibatch, and of an update."""
    calls = profile.device.host or HostCost(0.0)
    minibatch, update = calls.minibatch, calls.update
    for block, policy in zip(own, chosen, strict=True):
        if block.host is None:
            return 0.0, 0.0
        minibatch += block.host.minibatch + policy.launching(block)
        update += block.host.update
    return minibatch, update
