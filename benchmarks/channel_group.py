"""vpipe's channels as a backend of torch.distributed, for peers that speak nothing else.

NCCL refuses two ranks on one GPU, and gloo carries no tensors of GPUs. So that torch.distributed.pipelining can run
where vpipe does, it is given the same channel: CUDA IPC on a GPU, shared memory on the CPU.

    isend(tensor, 1)  ▶ message 0 to rank 1, copied into a slot at once
    irecv(tensor, 1)  ▶ will be message 0 from rank 1; `wait` copies it into the tensor

Messages between two ranks are matched by their order alone, as NCCL does it. A host waits until its peer's host has
issued the send, never for a GPU.
"""

from __future__ import annotations

from collections import Counter, deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vpipe.communication import Channel, World
from vpipe.communication.channel import Key

NAME = "vpipe"
ROOM = 4096
"""Messages that may be under way to a peer: a send never waits."""
POINT_TO_POINT, COLLECTIVE = range(2)


class _Done(dist.Work):
    """A send: its tensor has been copied."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _Receive(dist.Work):
    """A message that is to come into a tensor."""

    def __init__(self, channel: Channel, key: Key, tensor: Tensor) -> None:
        super().__init__()
        self._channel, self._key, self._tensor = channel, key, tensor
        self._waiting = True

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self._waiting:
            _take(self._channel, self._key, self._tensor)
            self._waiting = False
        return True

    def is_completed(self) -> bool:
        return not self._waiting


class _Own(dist.Work):
    """A message to oneself, which a pipeline sends where two neighbouring stages are one rank's."""

    def __init__(self, waiting: deque[Tensor], tensor: Tensor) -> None:
        super().__init__()
        self._waiting, self._tensor = waiting, tensor

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._tensor.data.copy_(self._waiting.popleft())
        return True


class ChannelGroup(dist.ProcessGroup):
    """A process group over channels: what pipelines call, and no more."""

    def __init__(self, rank: int, size: int, channels: dict[int, Channel]) -> None:
        super().__init__(rank, size)
        self._channels = channels
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        self._collectives = 0
        self._own: deque[Tensor] = deque()

    def getBackendName(self) -> str:
        return NAME

    def send(self, tensors: list[Tensor], to: int, tag: int) -> dist.Work:
        for tensor in tensors:
            if to == self.rank():
                self._own.append(tensor.clone())
                continue
            self._channels[to].send(Key(POINT_TO_POINT, self._sent[to]), tensor)
            self._sent[to] += 1
        return _Done()

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        (tensor,) = tensors
        if source == self.rank():
            return _Own(self._own, tensor)
        key = Key(POINT_TO_POINT, self._received[source])
        self._received[source] += 1
        return _Receive(self._channels[source], key, tensor)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """The sum over all ranks, added in their order: equal to the bit everywhere."""
        if opts is not None and opts.reduceOp != dist.ReduceOp.SUM:
            raise NotImplementedError(f"this group only sums, and {opts.reduceOp} was requested")
        for tensor in tensors:
            key = Key(COLLECTIVE, self._collectives)
            self._collectives += 1
            for channel in self._channels.values():
                channel.send(key, tensor)
            parts = {self.rank(): tensor.clone()}
            for peer, channel in self._channels.items():
                parts[peer] = torch.empty_like(tensor)
                _take(channel, key, parts[peer])
            tensor.copy_(torch.stack([parts[peer] for peer in range(self.size())]).sum(0))
        return _Done()

    def barrier(self, opts: Any = None) -> dist.Work:
        return self.allreduce([torch.zeros(1)])

    def shutdown(self) -> None:
        for channel in self._channels.values():
            channel.close()


def _take(channel: Channel, key: Key, tensor: Tensor) -> None:
    received = channel.receive(key, tensor.shape, tensor.dtype, tensor.device)
    tensor.data.copy_(received.view(tensor.shape))  # a pipeline's buffers are leaves of autograd
    channel.release(key)


def join_group(world: World, device: torch.device) -> None:
    """Make channels between the world's ranks the default group of torch.distributed."""
    channels = world.channels(ROOM, device)

    def make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> ChannelGroup:
        return ChannelGroup(rank, size, channels)

    dist.Backend.register_backend(NAME, make, devices=["cpu", "cuda"])
    # The ranks have met already: the group needs no store of its own, but torch does.
    dist.init_process_group(NAME, store=dist.HashStore(), rank=world.rank, world_size=world.size)
