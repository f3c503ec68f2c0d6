"""Memory policies: what a block holds between forward and backward, and what that costs.

A policy is one object in `POLICIES`. Planner and simulator ask it for its figures and know none by name, with three
exceptions: KEEP is the choice against which the others are measured, the file key `recompute_ratio` means RECOMPUTE,
and the columns of `vpipe plan` list the others. How a stage runs a policy is in `vpipe/stage/policies.py`.

To add a policy: derive from `MemoryPolicy`, override what differs from keeping, and call `register`.
"""

from __future__ import annotations

from vpipe.cost.costs import BlockCost, DeviceCost

KEEP, RECOMPUTE, SWAP = "keep", "recompute", "swap"


class MemoryPolicy:
    """Keep: activations stay on the device until backward has read them. The other policies derive from it.

    `entered` is what the block reads of the one before it, in bytes.
    """

    name = KEEP
    reruns_forward = False
    """Whether backward runs the whole forward again, in memory of its own."""

    def held(self, block: BlockCost, entered: int) -> int:
        """Bytes of one minibatch, while it is on the device."""
        return block.kept_bytes

    def minibatches(self, device: DeviceCost, in_flight: int) -> int:
        """How many of those in flight are on the device at most."""
        return in_flight

    def rebuilt(self, block: BlockCost, entered: int) -> int:
        """Bytes that backward makes again before it can run."""
        return 0

    def seconds(self, block: BlockCost) -> float:
        """What a minibatch takes longer, on the device."""
        return 0.0

    def launching(self, block: BlockCost) -> float:
        """What a minibatch takes longer, on the host."""
        return 0.0

    def copied(self, block: BlockCost) -> int:
        """Bytes of one minibatch that the host link carries out and back, beside the computation."""
        return 0


class RecomputePolicy(MemoryPolicy):
    """Only the block's input stays; backward runs the forward again."""

    name = RECOMPUTE
    reruns_forward = True

    def held(self, block: BlockCost, entered: int) -> int:
        return entered

    def rebuilt(self, block: BlockCost, entered: int) -> int:
        return block.kept_bytes - entered

    def seconds(self, block: BlockCost) -> float:
        return block.again

    def launching(self, block: BlockCost) -> float:
        return block.host.recomputing if block.host else 0.0


class SwapPolicy(MemoryPolicy):
    """Activations wait in host memory; those of a few minibatches are on the device."""

    name = SWAP

    def minibatches(self, device: DeviceCost, in_flight: int) -> int:
        return device.lying(in_flight)

    def seconds(self, block: BlockCost) -> float:
        return block.swapping

    def launching(self, block: BlockCost) -> float:
        return block.swapping

    def copied(self, block: BlockCost) -> int:
        return block.kept_bytes


POLICIES: dict[str, MemoryPolicy] = {}
"""By name, keep first; plan files and configurations use these names."""


def register(policy: MemoryPolicy) -> None:
    POLICIES[policy.name] = policy


for _policy in (MemoryPolicy(), RecomputePolicy(), SwapPolicy()):
    register(_policy)
