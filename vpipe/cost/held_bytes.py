"""The bytes that blocks hold between forward and backward: one statement, for the simulator and the planner.

A backward goes through a stage's blocks from the last to the first. Here the second of three is recomputed:

    block 0     block 1            block 2
    kept        input ▶ kept       given back; of a split backward `deferred` is left, until W
                + working

Before it runs again it holds its input, which is among what it keeps. So that moment needs, beyond what the stage
holds between forward and backward, its kept bytes less its input, what its backward makes for itself (working), less
what the blocks behind it gave back. Its forward came no further: these were still to come then.

Gradients are there all the time where several backwards add to them between two updates. Where an update follows
every backward they are `fresh`: none is there when it begins, each block that it is through with has left its own, and
the update takes them all.

In an asynchronous schedule an update comes right behind a backward, while the other minibatches are in flight: it needs
what it makes for itself (`update_bytes`) less what that backward gave back.

Replayed from CUDA graphs (`DeviceCost.graphs`) a backward uses none of what it gives back, unless it is split.
"""

from __future__ import annotations

from collections.abc import Sequence

from vpipe.cost.costs import BlockCost, Profile
from vpipe.cost.policies import POLICIES


def input_bytes(blocks: Sequence[BlockCost], number: int) -> int:
    """What a block reads of the one before it; the model's first reads the batch, which is not counted."""
    return blocks[number - 1].boundary_bytes if number else 0


def held_bytes(blocks: Sequence[BlockCost], number: int, policy: str) -> int:
    """What a block holds of a minibatch that is on the device and whose backward has not come to it."""
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
    """The most that the backward of a stage from block `start` on needs beyond what its minibatch held before.

    `updated`: with the update that follows it.
    """
    blocks, stop = profile.blocks, start + len(policies)
    gradients = profile.gradient_bytes(start, stop) if fresh else [0] * len(policies)
    reused = split or not profile.device.graphs
    most = gone = 0
    for number in range(stop - 1, start - 1, -1):
        policy, block, entered = (
            POLICIES[policies[number - start]],
            blocks[number],
            input_bytes(blocks, number),
        )
        most = max(most, block.working_bytes + policy.rebuilt(block, entered) - gone)
        if reused:
            left = gradients[number - start] + (block.deferred if split else 0)
            gone += policy.held(block, entered) - left
        most = max(most, -gone)  # gradients, or what waits for them, may need more than was held
    return max(most, update_bytes(blocks[start:stop]) - gone) if updated else most


def forward_bytes(profile: Profile, start: int, policies: Sequence[str]) -> int:
    """The most that a forward in a CUDA graph needs of its minibatch's memory beyond what it leaves there.

    A block's own lies beside what it and those before it leave; one that is run again has it elsewhere.
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
    """What the update of a stage of these blocks needs beyond its gradients."""
    return sum(block.update_bytes for block in blocks)
