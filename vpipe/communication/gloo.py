"""The channel over torch.distributed's tagged point-to-point: gloo, between any two hosts.

Gloo starts a transfer when both sides have posted it, in a thread of its own, so a send that meets a
receive posted ahead costs the sender nothing. It cannot be asked whether a transfer is done, only be
waited for: sent tensors are kept until the peer is known to have them (`confirm`) or the buffer is full.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vpipe.communication.channel import HOST, Channel, Key
from vpipe.errors import PeerError

_STREAMS = 4096
_NUMBERS = 1 << 18


def _tag(key: Key) -> int:
    """Both sides make the same tag; numbers come round long after their messages are gone."""
    if key.stream >= _STREAMS:
        raise PeerError(
            f"{key.stream + 1} named tensors cross the cuts, gloo tags hold {_STREAMS}: use fewer stages"
        )
    return key.number % _NUMBERS * _STREAMS + key.stream


class DistributedChannel(Channel):
    name = "gloo"
    takes_expectations = True

    def __init__(self, peer: int, buffer: int, timeout: float) -> None:
        super().__init__(peer, buffer, timeout)
        self._sent: dict[int, deque[tuple[Key, Any, Tensor]]] = defaultdict(deque)
        self._posted: dict[Key, tuple[Any, Tensor]] = {}

    def send(self, key: Key, tensor: Tensor) -> None:
        self._wait_for_room(key)
        tensor = tensor.detach().contiguous()
        self._sent[key.stream].append((key, self._begin(dist.isend, tensor, key), tensor))

    def expect(self, key: Key, shape: Sequence[int], dtype: torch.dtype, device: torch.device = HOST) -> None:
        if key not in self._posted:
            tensor = self._allocate(tuple(shape), dtype, device)
            self._posted[key] = (self._begin(dist.irecv, tensor, key), tensor)

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

    def _wait_for_room(self, key: Key) -> None:
        under_way = self._sent[key.stream]
        while len(under_way) >= self.buffer:
            self._wait(under_way[0][1], f"room to send {key}")
            under_way.popleft()

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory to receive into."""
        return torch.empty(shape, dtype=dtype)

    def _begin(self, transfer: Callable[..., Any], tensor: Tensor, key: Key) -> Any:
        try:
            return transfer(tensor, self.peer, **self._route(tensor, key))
        except RuntimeError as error:
            raise self._no_answer(f"message {key}", error) from error

    def _route(self, tensor: Tensor, key: Key) -> dict[str, Any]:
        """The arguments by which both sides find the same transfer."""
        return {"tag": _tag(key)}

    def _wait(self, work: Any, what: str) -> None:
        try:
            work.wait(timedelta(seconds=self.timeout))
        except RuntimeError as error:
            raise self._no_answer(what, error) from error

    def _no_answer(self, what: str, error: RuntimeError) -> PeerError:
        return PeerError(f"rank {self.peer} did not answer: {what} ({str(error).splitlines()[0]})")
