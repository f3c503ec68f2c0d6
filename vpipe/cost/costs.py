"""What blocks, devices and links cost: times in seconds, sizes in bytes, bandwidths in bytes a second.

All of a block's figures are those of one minibatch of `Profile.batch_size` samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class BlockCost:
    name: str
    forward: float
    input_gradient: float
    """The part of backward that another stage waits for."""
    weight_gradient: float
    update: float
    """The optimizer's part for this block's parameters, once for each update."""
    kept_bytes: int
    """What autograd keeps for backward and no earlier block has kept already; parameters are not counted."""
    boundary_bytes: int
    """What crosses the cut behind the block; its gradient is as large."""
    parameter_bytes: int
    spread: float = 0.0
    """How far the measured times lie apart, as a share of their median."""
    deferred_bytes: int | None = None
    """What is left between the two parts of a split backward: inputs and output gradients of products. None: as
    much as is kept."""
    version: float = 0.0
    """What an update takes more where the old weights are still read, so that they are copied."""
    splitting: float = 0.0
    """What a minibatch takes more where backward is split into its two parts."""
    accumulating: float = 0.0
    """What a backward takes more where it adds to the gradients of an earlier minibatch."""
    recomputing: float | None = None
    """What a minibatch takes more where the block is recomputed. None: as long as its forward."""
    split_recomputing: float | None = None
    """The same where backward is split into its two parts. None: as long as where it is not."""
    swapping: float = 0.0
    """What a minibatch takes more where the block is swapped, beyond the copies, which run beside it: a host that asks
    for them, packs and unpacks."""
    working_bytes: int = 0
    """What its forward or backward makes, at most, and gives back: gradients of activations, workspaces. 0 where no
    allocator tells."""
    forward_bytes: int = 0
    """The same of its forward alone."""
    update_bytes: int = 0
    """What its update makes, at most, and gives back, beyond the gradients that are there: under mixed precision these
    in float32. 0 where no allocator tells."""

    @property
    def deferred(self) -> int:
        return self.kept_bytes if self.deferred_bytes is None else self.deferred_bytes

    @property
    def again(self) -> float:
        """What recomputing it takes."""
        return self.forward if self.recomputing is None else self.recomputing

    @property
    def backward(self) -> float:
        return self.input_gradient + self.weight_gradient


@dataclass(frozen=True)
class DeviceCost:
    memory: int
    to_host: float
    from_host: float
    overhead: float = 0.0
    """What each forward and each (part of a) backward of a stage takes beyond its blocks."""
    shared_by: int = 1
    """Ranks, one after the other, that share the device and its link to the host: those of one GPU."""
    crowding: float = 1.0
    """The blocks' times, which are those while all of these ranks compute, over the times of one rank alone."""
    workspace: int = 0
    """Bytes that libraries hold on the device for each rank, from its first product on."""
    swapped_in: int = 2
    """Minibatches of a swapped block that lie on the device at most: 3 where copies run beside computing (GPUs), so
    that one which leaves stays until the next forward; 2 where they are done at once."""
    adding: float = 0.0
    """Seconds for each byte of a gradient that stages share: what it takes to add up its parts, beyond the messages."""
    graphs: bool = False
    """Whether stages are played from CUDA graphs: times are of that, and no memory of theirs is used for others."""
    slack: int = 0
    """Bytes that the memory of a minibatch in flight is larger there than it need be: it is taken in pieces."""

    @property
    def lingering(self) -> int:
        """Of these the ones that have left but still lie there, also when no other is in flight."""
        return self.swapped_in - 2

    def lying(self, in_flight: int) -> int:
        """Minibatches of a swapped block that lie on the device at most, of so many in flight."""
        return min(in_flight + self.lingering, self.swapped_in)


@dataclass(frozen=True)
class LinkCost:
    bandwidth: float
    latency: float
    sender_busy: bool = False
    """Whether the sending rank copies the message itself and computes nothing meanwhile: shared memory on CPU."""

    def seconds(self, count: float) -> float:
        """How long so many bytes are under way."""
        return self.latency + count / self.bandwidth


def broadcast_seconds(links: Sequence[LinkCost], count: float) -> float:
    """How long a rank sends the same bytes over each link: at the same time, unless it copies them itself."""
    copied = sum(link.seconds(count) for link in links if link.sender_busy)
    return max([copied, *(link.seconds(count) for link in links if not link.sender_busy)])


@dataclass(frozen=True)
class Tie:
    """A parameter that several blocks share; each of them counts its bytes."""

    bytes: int
    blocks: tuple[int, ...]

    def inside(self, start: int, stop: int) -> int:
        """How many of its blocks are among those from `start` up to `stop`."""
        return sum(start <= block < stop for block in self.blocks)


@dataclass(frozen=True)
class Profile:
    blocks: tuple[BlockCost, ...]
    device: DeviceCost
    link: LinkCost
    """Between any two ranks, unless `links` says otherwise."""
    batch_size: int
    optimizer_ratio: float = 2.0
    """Bytes of optimizer state for each byte of parameters: 2 for Adam, 1 for SGD with momentum."""
    links: Mapping[tuple[int, int], LinkCost] = field(default_factory=dict)
    """By sending and receiving rank."""
    fingerprint: str = ""
    """That of the model; empty if it is unknown."""
    tied: tuple[Tie, ...] = ()

    def parameter_bytes(self, start: int, stop: int) -> int:
        """Of the blocks from `start` up to `stop`, what they share counted once."""
        counted = sum(block.parameter_bytes for block in self.blocks[start:stop])
        return counted - sum(tie.bytes * max(0, tie.inside(start, stop) - 1) for tie in self.tied)

    def gradient_bytes(self, start: int, stop: int) -> list[int]:
        """What a backward of these blocks leaves for each: its parameters, but those of a later one not again."""
        sizes = [block.parameter_bytes for block in self.blocks[start:stop]]
        for tie in self.tied:
            for block in [block for block in tie.blocks if start <= block < stop][:-1]:
                sizes[block - start] -= tie.bytes
        return sizes

    def exchanged_bytes(self, start: int, stop: int) -> int:
        """Gradients that a stage of these blocks and another one add up for each update."""
        return sum(tie.bytes for tie in self.tied if 0 < tie.inside(start, stop) < len(tie.blocks))

    def exchange_buffers(self, start: int, stop: int, lag: int) -> int:
        """What they hold for that, where the first of these stages may be so many updates behind the last.

        A part on its way and the sum; the first stage a second part on its way. The others, which apply the sum so
        much later, have the parts of all updates between, on their way and their own. Their sum only lies there while
        they update, when what the backward before needed is gone.
        """
        size = 0
        for tie in self.tied:
            if 0 < tie.inside(start, stop) < len(tie.blocks):
                first = start <= tie.blocks[0] < stop
                size += tie.bytes * (2 + (min(lag, 1) if first else max(0, 2 * lag - 2)))
        return size

    def exchange_seconds(self, count: int) -> float:
        """How long a rank that copies its messages itself sends gradients and adds those of another stage."""
        copying = 2 * self.link.seconds(count) if count and self.link.sender_busy else 0.0
        return copying + count * self.device.adding

    def link_between(self, sender: int, receiver: int) -> LinkCost:
        return self.links.get((sender, receiver), self.link)
