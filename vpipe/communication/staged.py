"""The channel between GPUs of different hosts without NCCL: through pinned memory of both hosts, over gloo.

Gloo must not read a buffer before the GPU has written it, and only the host can know: a thread waits for each copy
and starts its transfer, in order, while the rank goes on. On the other side the receive is posted ahead into pinned
memory and the copy to the GPU runs on a stream of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotStarted
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from vpipe.communication.channel import HOST, Key
from vpipe.communication.gloo import DistributedChannel


class _StagedWork(NamedTuple):
    """A transfer that starts when its copy is made, waited for as torch's own works are."""

    started: Future[Any]

    def wait(self, timeout: timedelta) -> None:
        try:
            work = self.started.result(timeout.total_seconds())
        except NotStarted:
            raise RuntimeError("the GPU has not copied it to the host") from None
        work.wait(timeout)


class StagedChannel(DistributedChannel):
    name = "gloo, through host memory"

    def __init__(self, peer: int, buffer: int, timeout: float, device: torch.device) -> None:
        super().__init__(peer, buffer, timeout)
        self.device = device
        self._copies = torch.cuda.Stream(device)  # of what arrives
        self._starter = ThreadPoolExecutor(1, f"to rank {peer}")
        self._newest: Future[Any] | None = None

    def send(self, key: Key, tensor: Tensor) -> None:
        if not tensor.is_cuda:
            super().send(key, tensor)
            return
        if self._newest is not None and self._newest.done():
            self._newest.result()  # raises if it could not be started
        self._wait_for_room(key)
        staged = _pinned(tuple(tensor.shape), tensor.dtype)
        staged.copy_(tensor.detach(), non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(self.device))
        self._newest = self._starter.submit(self._begin_when_copied, key, staged, copied)
        self._sent[key.stream].append((key, _StagedWork(self._newest), staged))

    def receive(
        self, key: Key, shape: Sequence[int], dtype: torch.dtype, device: torch.device = HOST
    ) -> Tensor:
        arrived = super().receive(key, shape, dtype, device)
        if device.type != "cuda":
            return arrived
        tensor = torch.empty_like(arrived, device=self.device)
        current = torch.cuda.current_stream(self.device)
        self._copies.wait_stream(current)  # the memory may still be read by what was there before
        with torch.cuda.stream(self._copies):
            tensor.copy_(arrived, non_blocking=True)
        current.wait_stream(self._copies)
        return tensor

    def close(self) -> None:
        self._starter.shutdown(wait=False, cancel_futures=True)
        super().close()

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        return _pinned(shape, dtype) if device.type == "cuda" else super()._allocate(shape, dtype, device)

    def _begin_when_copied(self, key: Key, staged: Tensor, copied: torch.cuda.Event) -> Any:
        copied.synchronize()
        return self._begin(dist.isend, staged, key)


def _pinned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, pin_memory=True)
