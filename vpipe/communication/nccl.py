"""The channel over NCCL: tensors of GPUs go from card to card, plain numbers by gloo.

NCCL has no tags: two ranks must start their transfers on one communicator in the same order. A stream (one named
tensor in one direction) is sent and received in order of its minibatches whatever the schedule, but different
streams of one pair may be posted in different orders on the two sides. So each stream has a process group, and with
it communicators, of its own, and neither forward and backward nor two tensors queue behind each other. Groups are
cheap: NCCL connects a pair when the first message between them is posted.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vpipe.communication.channel import Key
from vpipe.communication.gloo import DistributedChannel


class StreamGroups:
    """A process group for each stream, made by all ranks together once the number of streams is known."""

    def __init__(self, needed: bool, timeout: float, backend: str = "nccl") -> None:
        self._needed = needed
        self._timeout = timeout
        self._backend = backend
        self._groups: list[Any] = []

    def open(self, count: int) -> None:
        if self._needed:
            wait = timedelta(seconds=self._timeout)
            self._groups = [dist.new_group(backend=self._backend, timeout=wait) for _ in range(count)]

    def __getitem__(self, stream: int) -> Any:
        return self._groups[stream]

    def close(self) -> None:
        for group in self._groups:
            dist.destroy_process_group(group)
        self._groups.clear()


class GroupChannel(DistributedChannel):
    """`everything` sends host tensors over the groups too: for tests without a GPU."""

    name = "NCCL"

    def __init__(
        self, peer: int, buffer: int, timeout: float, groups: StreamGroups, *, everything: bool = False
    ) -> None:
        super().__init__(peer, buffer, timeout)
        self._groups = groups
        self._everything = everything

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def _route(self, tensor: Tensor, key: Key) -> dict[str, Any]:
        if self._everything or tensor.is_cuda:
            return {"group": self._groups[key.stream]}
        return super()._route(tensor, key)
