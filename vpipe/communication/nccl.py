"""The channel over NCCL: tensors of GPUs go from card to card, plain numbers by gloo.

NCCL has no tags: two ranks must start their transfers on one communicator in the same order. A stream (one named
tensor in one direction) is sent and received in order of its minibatches whatever the schedule, but different
streams of one pair may be posted in different orders on the two sides. So each stream has a process group, and with
it communicators, of its own, and neither forward and backward nor two tensors queue behind each other. Groups are
cheap: NCCL connects a pair when the first message between them is posted.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vpipe.communication.channel import HOST, Key
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
        self._under_way: dict[int, deque[tuple[Any, Tensor]]] = defaultdict(deque)  # sent on the device
        self._expected: dict[Key, tuple[Any, Tensor]] = {}

    def send(self, key: Key, tensor: Tensor) -> None:
        if not self._on_groups(tensor.device):
            super().send(key, tensor)
            return
        tensor = tensor.detach().contiguous()
        under_way = self._under_way[key.stream]
        under_way.append((self._begin_on(key, dist.isend, tensor), tensor))
        if len(under_way) > self.buffer:
            # The oldest: its memory may be used again by what follows on this stream.
            self._wait(under_way.popleft()[0], f"room to send {key}")

    def expect(self, key: Key, shape: Sequence[int], dtype: torch.dtype, device: torch.device = HOST) -> None:
        if not self._on_groups(device):
            super().expect(key, shape, dtype, device)
        elif key not in self._expected:
            tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
            self._expected[key] = (self._begin_on(key, dist.irecv, tensor), tensor)

    def receive(
        self, key: Key, shape: Sequence[int], dtype: torch.dtype, device: torch.device = HOST
    ) -> Tensor:
        if not self._on_groups(device):
            return super().receive(key, shape, dtype, device)
        self.expect(key, shape, dtype, device)
        work, tensor = self._expected.pop(key)
        self._wait(work, f"message {key}")  # NCCL: the stream waits, not the host
        return tensor

    def leftovers(self) -> list[str]:
        for under_way in self._under_way.values():
            while under_way:
                self._wait(under_way.popleft()[0], "the last messages to be taken")
        unread = [f"{key} from rank {self.peer} was posted and not taken" for key in self._expected]
        return unread + super().leftovers()

    def close(self) -> None:
        super().close()
        self._under_way.clear()
        self._expected.clear()

    def _on_groups(self, device: torch.device) -> bool:
        return self._everything or device.type == "cuda"

    def _begin_on(self, key: Key, transfer: Any, tensor: Tensor) -> Any:
        try:
            return transfer(tensor, self.peer, group=self._groups[key.stream])
        except RuntimeError as error:
            raise self._no_answer(f"message {key}", error) from error
