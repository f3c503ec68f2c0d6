"""The bytes that blocks hold between forward and backward, for the simulator and the planner.

A backward goes through a stage's blocks from the last to the first. Here the second of three is recomputed:

    block 0     block 1            block 2
    kept        input ▶ kept       freed; of a split backward `deferred` is left, until W
                + working

Before block 1 is recomputed the stage holds its input, which is among its kept bytes. Its backward then needs, beyond
what the stage holds between forward and backward: its kept bytes less its input, and its working bytes, less what the
blocks behind it have freed.

Gradients are allocated all the time where several backwards add to them between two updates. Where an update follows
every backward they are `fresh`: a backward begins with none, each block leaves its own, and the update frees them all.

In an asynchronous schedule an update follows a backward while other minibatches are in flight: it needs its
`update_bytes` less what that backward has freed.

With CUDA graphs (`DeviceCost.graphs`) a backward cannot use the memory that it frees, unless it is split.
"""

from __future__ import annotations

from collections.abc import Sequence

from vpipe.cost.costs import BlockCost, Profile
from vpipe.cost.policies import POLICIES


def input_bytes(blocks: Sequence[BlockCost], number: int) -> int:
    """Bytes that a block reads of the one before it; the first block reads the batch, which is not counted."""
    return blocks[number - 1].boundary_bytes if number else 0


def held_bytes(blocks: Sequence[BlockCost], number: int, policy: str) -> int:
    """Bytes that a block holds of a minibatch on the device before its backward."""
    return POLICIES[policy].held(blocks[number], input_bytes(blocks, number))


def backward_bytes(
    profile: Profile,
    start: int,
    policies: Sequence[str],
    *,
    split: bool = False,
    fresh: bool = False,
    updated: bool = False,
) -> int:
    """The most bytes that the backward of a stage from block `start` on needs beyond what its minibatch held before.

    `updated`: with the update that follows it.
    """
    blocks, stop = profile.blocks, start + len(policies)
    gradients = profile.gradient_bytes(start, stop) if fresh else [0] * len(policies)
    reusable = split or not profile.device.graphs
    most = freed = 0
    for number in range(stop - 1, start - 1, -1):
        policy, block = POLICIES[policies[number - start]], blocks[number]
        entered = input_bytes(blocks, number)
        most = max(most, block.working_bytes + policy.rebuilt(block, entered) - freed)
        if reusable:
            left = gradients[number - start] + (block.deferred if split else 0)
            freed += policy.held(block, entered) - left
        most = max(most, -freed)  # gradients, or what waits for them, may need more than was held
    return max(most, update_bytes(blocks[start:stop]) - freed) if updated else most


def forward_bytes(profile: Profile, start: int, policies: Sequence[str]) -> int:
    """The most bytes that a forward with CUDA graphs needs in its minibatch's memory beyond what it keeps there.

    A block's own are allocated beside what it and the blocks before it keep; a recomputed block has them elsewhere.
    """
    blocks = profile.blocks
    most = behind = 0
    for number in range(start + len(policies) - 1, start - 1, -1):
        policy = policies[number - start]
        if not POLICIES[policy].reruns_forward:
            most = max(most, blocks[number].forward_bytes - behind)
        behind += held_bytes(blocks, number, policy)
    return most


def update_bytes(blocks: Sequence[BlockCost]) -> int:
    """Bytes that the update of a stage of these blocks needs beyond its gradients."""
    return sum(block.update_bytes for block in blocks)
