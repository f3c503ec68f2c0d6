"""The channels over gloo, torch.distributed's transfers between hosts: from host memory, and through it from GPUs."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotStarted
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from vpipe.communication.channel import HOST, Channel, Key
from vpipe.errors import PeerError

_SEND, _RECEIVE = "send", "recv"  # methods of a group
_STREAMS = 4096
_NUMBERS = 1 << 18


def gloo_group(store: dist.Store, rank: int, size: int, timeout: float) -> dist.ProcessGroupGloo:
    """A group of our own, which torch.distributed's functions do not know.

    A user may have a default group for other purposes: without gloo, or bound to a GPU, where torch derives every
    further group from its communicator. And nobody's `destroy_process_group` ends ours.
    """
    return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout))


def _tag(key: Key) -> int:
    """Both sides make the same tag; numbers repeat long after their messages were taken."""
    if key.stream >= _STREAMS:
        raise PeerError(
            f"{key.stream + 1} named tensors cross the cuts, gloo tags hold {_STREAMS}: use fewer stages"
        )
    return key.number % _NUMBERS * _STREAMS + key.stream


class DistributedChannel(Channel):
    """Over gloo, between any two hosts.

    Gloo starts a transfer when both sides have posted it, in a thread of its own, so a send that meets a receive
    posted ahead costs the sender nothing. Whether a transfer is done cannot be read, only waited for: sent
    tensors are kept until the peer is known to have them (`confirm`) or the buffer is full.
    """

    name = "gloo"
    takes_expectations = True

    def __init__(self, peer: int, buffer: int, timeout: float, group: Any) -> None:
        """The group is a `gloo_group`, of all ranks."""
        super().__init__(peer, buffer, timeout)
        self._group = group
        self._sent: dict[int, deque[tuple[Key, Any, Tensor]]] = defaultdict(deque)
        self._posted: dict[Key, tuple[Any, Tensor]] = {}

    def send(self, key: Key, tensor: Tensor) -> None:
        self._wait_for_room(key)
        tensor = tensor.detach().contiguous()
        self._sent[key.stream].append((key, self._begin(_SEND, tensor, key), tensor))

    def expect(self, key: Key, shape: Sequence[int], dtype: torch.dtype, device: torch.device = HOST) -> None:
        if key not in self._posted:
            tensor = self._allocate(tuple(shape), dtype, device)
            self._posted[key] = (self._begin(_RECEIVE, tensor, key), tensor)

    def receive(
        self, key: Key, shape: Sequence[int], dtype: torch.dtype, device: torch.device = HOST
    ) -> Tensor:
        self.expect(key, shape, dtype, device)
        work, tensor = self._posted.pop(key)
        self._wait(work, f"message {key}")
        return tensor

    def confirm(self, key: Key) -> None:
        under_way = self._sent[key.stream]
        while under_way and under_way[0][0].number <= key.number:
            self._wait(under_way.popleft()[1], f"message {key} to be taken")

    def leftovers(self) -> list[str]:
        for under_way in self._sent.values():
            while under_way:
                key, work, _ = under_way.popleft()
                self._wait(work, f"message {key} to be taken")
        return [f"{key} from rank {self.peer} was posted and not taken" for key in self._posted]

    def close(self) -> None:
        self._sent.clear()
        self._posted.clear()
        self._group = None  # the peers see that we are gone when all channels have let go of it

    def _wait_for_room(self, key: Key) -> None:
        under_way = self._sent[key.stream]
        while len(under_way) >= self.buffer:
            self._wait(under_way[0][1], f"room to send {key}")
            under_way.popleft()

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory to receive into."""
        return torch.empty(shape, dtype=dtype)

    def _begin(self, transfer: str, tensor: Tensor, key: Key) -> Any:
        try:
            return getattr(self._group, transfer)([tensor], self.peer, _tag(key))
        except RuntimeError as error:
            raise self._no_answer(f"message {key}", error) from error

    def _wait(self, work: Any, what: str) -> None:
        try:
            work.wait(timedelta(seconds=self.timeout))
        except RuntimeError as error:
            raise self._no_answer(what, error) from error

    def _no_answer(self, what: str, error: RuntimeError) -> PeerError:
        return PeerError(f"rank {self.peer} did not answer: {what} ({str(error).splitlines()[0]})")


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
    """Between GPUs without NCCL or CUDA IPC: through pinned memory of both hosts, over gloo.

    Gloo must not read a buffer before the GPU has written it, and only the host can know: a thread waits for each copy
    and starts its transfer, in order, while the rank goes on. On the other side the receive is posted ahead into
    pinned memory and the copy to the GPU runs on a stream of its own.
    """

    name = "gloo, through host memory"

    def __init__(self, peer: int, buffer: int, timeout: float, group: Any, device: torch.device) -> None:
        super().__init__(peer, buffer, timeout, group)
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
        return self._begin(_SEND, staged, key)


def _pinned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, pin_memory=True)
