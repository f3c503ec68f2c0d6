"""The costs of blocks, devices and links, which a profile holds.

All figures of a block are those of one minibatch of `Profile.batch_size` samples. Each field states its unit, and
whether it scales with the samples of a minibatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, StrictBool
from pydantic import Field as FileKey

from vpipe.cost.fields import FileObject, Unit
from vpipe.cost.links import BytesPerSecond, Hosts, LinkCost, Links, Seconds

Bytes = Annotated[int, Unit("bytes")]
SecondsOfSamples = Annotated[float, Unit("seconds", scales=True)]
BytesOfSamples = Annotated[int, Unit("bytes", scales=True)]


@dataclass(frozen=True)
class HostCost(FileObject):
    """The host's time to launch a block's kernels on a GPU, whatever the number of samples."""

    minibatch: Seconds
    """Of a forward and a backward."""
    update: Seconds = 0.0
    recomputing: Seconds = 0.0
    """Additional time of a minibatch when the block is recomputed."""
    splitting: Seconds = 0.0
    """Additional time of a minibatch when backward is split into its two parts."""


@dataclass(frozen=True)
class BlockCost(FileObject):
    name: str
    forward: SecondsOfSamples
    input_gradient: SecondsOfSamples
    """The part of backward that another stage waits for."""
    weight_gradient: SecondsOfSamples
    update: Seconds
    """The optimizer's part for this block's parameters, once for each update."""
    kept_bytes: BytesOfSamples
    """Kept by autograd for backward, without parameters and without what an earlier block keeps already."""
    boundary_bytes: BytesOfSamples
    """Size of the values that cross the cut behind the block; their gradient is as large."""
    parameter_bytes: Bytes
    spread: Annotated[float, Unit("a share of the median")] = 0.0
    """Range of the middle half of the measured times, or the noise that hides a time, if that is larger."""
    deferred_bytes: BytesOfSamples | None = None
    """Left between the two parts of a split backward: inputs and output gradients of products. None: `kept_bytes`."""
    version: Seconds = 0.0
    """Additional time of an update when the old weights are still read, so that they are copied."""
    splitting: SecondsOfSamples = 0.0
    """Additional time of a minibatch when backward is split into its two parts."""
    accumulating: Seconds = 0.0
    """Additional time of a backward that adds to the gradients of an earlier minibatch."""
    recomputing: SecondsOfSamples | None = None
    """Additional time of a minibatch when the block is recomputed. None: as long as its forward."""
    split_recomputing: SecondsOfSamples | None = None
    """The same when backward is split into its two parts. None: `recomputing`."""
    swapping: Seconds = 0.0
    """Additional time of a minibatch when the block is swapped: the host's work to start copies, to pack and unpack.
    The copies themselves overlap with computing."""
    working_bytes: BytesOfSamples = 0
    """The most that its forward or backward allocates and frees again: gradients of activations, workspaces. 0 where
    no allocator counts it."""
    forward_bytes: BytesOfSamples = 0
    """The same of its forward alone."""
    update_bytes: Bytes = 0
    """The most that its update allocates and frees again, beyond the gradients that are there: under mixed precision
    these in float32. 0 where no allocator counts it."""
    host: HostCost | None = None
    """None: not known, or the host computes the block itself (on a CPU)."""

    @property
    def deferred(self) -> int:
        return self.kept_bytes if self.deferred_bytes is None else self.deferred_bytes

    @property
    def again(self) -> float:
        """Seconds to recompute it."""
        return self.forward if self.recomputing is None else self.recomputing

    @property
    def backward(self) -> float:
        return self.input_gradient + self.weight_gradient


@dataclass(frozen=True)
class DeviceCost(FileObject):
    memory: Annotated[int, Unit("bytes", least=1)]
    to_host: BytesPerSecond
    from_host: BytesPerSecond
    overhead: Seconds = 0.0
    """Additional time of each forward and each (part of a) backward of a stage, beyond its blocks."""
    shared_by: Annotated[int, Unit("ranks", least=1)] = 1
    """Consecutive ranks that share the device and its link to the host: those of one GPU."""
    crowding: Annotated[float, Unit("times as long as alone", least=1)] = 1.0
    """Contention on a shared device: the blocks' times, measured while all of these ranks compute, over the times of
    one rank alone."""
    at_once: Annotated[float, Unit("ranks")] = 0.0
    """How many ranks of a host can compute at the same time in the blocks' times; more of them take turns on its cores.
    0: all of them."""
    workspace: Bytes = 0
    """Held by libraries on the device for each rank, from its first product on."""
    context: Bytes = 0
    """Taken on the device by the CUDA context of each rank, beside all that its allocator counts."""
    communicators: Bytes = 0
    """The same by NCCL, where it connects ranks."""
    swapped_in: Annotated[int, Unit("minibatches", least=2)] = 2
    """The most minibatches of a swapped block that are on the device: 3 where copies overlap with computing (GPUs), so
    that one which is copied out stays until the next forward; 2 where they do not."""
    adding: Annotated[float, Unit("seconds a byte")] = 0.0
    """The time to add up the parts of a gradient that stages share, beyond the messages."""
    pack_bf16: Annotated[float, Unit("seconds a byte")] = 0.0
    pack_int8: Annotated[float, Unit("seconds a byte")] = 0.0
    pack_int4: Annotated[float, Unit("seconds a byte")] = 0.0
    """The time to pack and unpack a byte of float32 that is compressed on its way to another host."""
    graphs: StrictBool = False
    """Whether stages are replayed from CUDA graphs: times are of that, and no memory of theirs is used for others."""
    eager_kinds: Annotated[int, Unit("kinds of blocks")] = 0
    """Of blocks whose CUDA graphs found no memory while they were measured: their times are those of eager blocks."""
    slack: Bytes = 0
    """Additional memory of a minibatch in flight with CUDA graphs, because memory is reserved in large pieces."""
    host: HostCost | None = None
    """The host's time for a stage beyond its blocks: the calls."""

    @property
    def usable(self) -> int:
        """Bytes that a rank may allocate."""
        return max(1, self.memory - self.context - self.communicators)

    @property
    def lingering(self) -> int:
        """Of these the ones that were copied out but are not freed yet, even when no other is in flight."""
        return self.swapped_in - 2

    def lying(self, in_flight: int) -> int:
        """The most minibatches of a swapped block that are on the device, of so many in flight."""
        return min(in_flight + self.lingering, self.swapped_in)


def all_reduce_seconds(links: Sequence[LinkCost], count: float) -> float:
    """The time of a rank with links to R - 1 others to add up so many bytes with them.

    Twice it sends the R-th part to each of the others, one after the other: 2 (R - 1) / R of the bytes.
    """
    return 2 * sum(link.seconds(count / (len(links) + 1)) for link in links)


MOST_BUCKETS, BUCKET = 8, 4 * 2**20
"""As the runtime has them (`runtime/buckets.py`)."""


def bucket_count(count: float) -> int:
    """In how many parts the replicas of a stage add up gradients of so many bytes."""
    return max(1, min(MOST_BUCKETS, ceil(count / BUCKET)))


def _different(blocks: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(blocks)) < max(2, len(blocks)):
        raise ValueError("different numbers of two or more blocks")
    return tuple(sorted(blocks))


@dataclass(frozen=True)
class Tie(FileObject):
    """A parameter that several blocks share; each of them counts its bytes."""

    bytes: Bytes
    blocks: Annotated[tuple[Annotated[int, Unit("a block's number")], ...], AfterValidator(_different)]

    def inside(self, start: int, stop: int) -> int:
        """How many of its blocks are among those from `start` up to `stop`."""
        return sum(start <= block < stop for block in self.blocks)


def _completed(blocks: Any) -> Any:
    """A block without a name is called by its number; a file may leave out its update."""
    if not isinstance(blocks, list):
        return blocks
    return [
        {"name": f"block {number}", "update": 0.0} | block if isinstance(block, dict) else block
        for number, block in enumerate(blocks)
    ]


Blocks = Annotated[tuple[BlockCost, ...], BeforeValidator(_completed), FileKey(min_length=1)]
BatchSize = Annotated[int, Unit("samples of a minibatch", least=1)]


@dataclass(frozen=True)
class OtherSize(FileObject):
    """The same blocks, measured with minibatches of another size."""

    batch_size: BatchSize
    blocks: Blocks
    overhead: Seconds = 0.0
    """That of the device: where the host cannot keep a GPU busy, it depends on the size."""


@dataclass(frozen=True)
class Profile(FileObject):
    blocks: Blocks
    device: DeviceCost
    link: LinkCost
    """Between any two ranks, unless `links` or `hosts` say otherwise."""
    batch_size: BatchSize
    optimizer_ratio: Annotated[float, Unit("bytes for each byte of parameters")] = 2.0
    """Size of the optimizer's state: 2 for Adam, 1 for SGD with momentum."""
    optimizer: str = ""
    """Whose updates the blocks' are; empty if it is unknown."""
    links: Links = field(default_factory=dict)
    """By sending and receiving rank."""
    hosts: Hosts | None = None
    """None: all ranks are on one host."""
    fingerprint: str = ""
    """That of the model; empty if it is unknown."""
    tied: tuple[Tie, ...] = ()
    other_sizes: tuple[OtherSize, ...] = ()
    """For plans with other sizes (`scaling.py`)."""
    format: Literal["vpipe profile 1"] = "vpipe profile 1"

    def parameter_bytes(self, start: int, stop: int) -> int:
        """Of the blocks from `start` up to `stop`, shared parameters counted once."""
        counted = sum(block.parameter_bytes for block in self.blocks[start:stop])
        return counted - sum(tie.bytes * max(0, tie.inside(start, stop) - 1) for tie in self.tied)

    def gradient_bytes(self, start: int, stop: int) -> list[int]:
        """The gradients that a backward of these blocks makes in each, without those of a later one."""
        sizes = [block.parameter_bytes for block in self.blocks[start:stop]]
        for tie in self.tied:
            for block in [block for block in tie.blocks if start <= block < stop][:-1]:
                sizes[block - start] -= tie.bytes
        return sizes

    def exchanged_bytes(self, start: int, stop: int) -> int:
        """Gradients that a stage of these blocks and another one add up at each update."""
        return sum(tie.bytes for tie in self.tied if 0 < tie.inside(start, stop) < len(tie.blocks))

    def exchange_buffers(self, start: int, stop: int, lag: int, *, apart: bool = True) -> int:
        """Bytes that they hold for that at their peak, where the first of these stages may be `lag` updates behind the
        last.

        In a synchronous schedule (no lag) a part and the sum, or the sum alone where no other rank has a part (not
        `apart`). Else the first stage has one part in use, one under way and their sum in float32; the others apply the
        sum `lag` updates later, and hold the parts of all updates between, those under way and their own.
        """
        size = 0
        for tie in self.tied:
            if 0 < tie.inside(start, stop) < len(tie.blocks):
                first = start <= tie.blocks[0] < stop
                size += tie.bytes * ((4 if first else 2 * lag + 1) if lag else 1 + apart)
        return size

    def exchange_seconds(self, count: int) -> float:
        """The time of a rank to add the gradients of another stage, and to send its own where it copies messages."""
        copying = 2 * self.link.seconds(count) if count and self.link.sender_busy else 0.0
        return copying + count * self.device.adding

    def host_of(self, rank: int) -> int:
        return 0 if self.hosts is None else self.hosts.host_of(rank)

    def link_between(self, sender: int, receiver: int) -> LinkCost:
        """`links` come first: what was measured of the two ranks themselves."""
        link = self.links.get((sender, receiver))
        if link is None and self.hosts is not None:
            link = self.hosts.link_between(sender, receiver)
        return link or self.link
