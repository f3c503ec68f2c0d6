"""The channel between GPUs of different hosts without NCCL: through pinned memory of both hosts, over gloo.

Gloo must not read a buffer before the GPU has written it, and only the host can know: a thread waits for each copy
and starts its transfer, in order, while the rank goes on. On the other side the receive is posted ahead into pinned
memory and the copy to the GPU runs on a stream of its own.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from vpipe.communication.channel import HOST, Key
from vpipe.communication.gloo import DistributedChannel
from vpipe.errors import PeerError


class StagedChannel(DistributedChannel):
    name = "gloo, through host memory"

    def __init__(self, peer: int, buffer: int, timeout: float, device: torch.device) -> None:
        super().__init__(peer, buffer, timeout)
        self.device = device
        self._coming = torch.cuda.Stream(device)
        self._to_do: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        threading.Thread(target=self._work, daemon=True, name=f"to rank {peer}").start()

    def send(self, key: Key, tensor: Tensor) -> None:
        if self._failure is not None:
            raise self._failure
        if not tensor.is_cuda:
            super().send(key, tensor)
            return
        staged = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        staged.copy_(tensor.detach(), non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(self.device))
        self._to_do.put(partial(self._send_when_copied, key, staged, copied))

    def expect(self, key: Key, shape: Sequence[int], dtype: torch.dtype, device: torch.device = HOST) -> None:
        if device.type != "cuda":
            super().expect(key, shape, dtype, device)
        elif key not in self._posted:
            tensor = torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
            self._posted[key] = (self._begin(dist.irecv, tensor, key), tensor)

    def receive(
        self, key: Key, shape: Sequence[int], dtype: torch.dtype, device: torch.device = HOST
    ) -> Tensor:
        arrived = super().receive(key, shape, dtype, device)
        if device.type != "cuda":
            return arrived
        tensor = torch.empty_like(arrived, device=self.device)
        current = torch.cuda.current_stream(self.device)
        self._coming.wait_stream(current)  # the memory may still be read by what was there before
        with torch.cuda.stream(self._coming):
            tensor.copy_(arrived, non_blocking=True)
        current.wait_stream(self._coming)
        return tensor

    def confirm(self, key: Key) -> None:
        """The sending thread keeps the account of what is under way."""

    def leftovers(self) -> list[str]:
        done = threading.Event()
        self._to_do.put(done.set)
        if not done.wait(self.timeout):
            raise self._failure or PeerError(f"waited {self.timeout:g} s for messages to rank {self.peer}")
        return super().leftovers()

    def close(self) -> None:
        self._to_do.put(None)
        super().close()

    def _send_when_copied(self, key: Key, staged: Tensor, copied: torch.cuda.Event) -> None:
        copied.synchronize()
        super().send(key, staged)

    def _work(self) -> None:
        try:
            while (next_one := self._to_do.get()) is not None:
                next_one()
        except BaseException as error:
            self._failure = error
