"""The interface of all channels: tensors under a key, from this rank to one peer and back."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

HOST = torch.device("cpu")


class Key(NamedTuple):
    """The name of a message: which tensor's stream, and its number in that stream (the minibatch)."""

    stream: int
    number: int


class Channel(ABC):
    """A two-way link with one peer.

    A send returns at once unless `buffer` messages of its stream have not been taken yet: that is the
    channel's back-pressure, and the rule under which schedules are checked. The tensor must not be
    changed after it was sent. A received tensor belongs to the channel and may be read until `release`.
    """

    name: ClassVar[str]
    """The transport, for the log."""
    takes_expectations: ClassVar[bool] = False
    """Whether `expect` does anything: a channel that pushes needs no such hint."""

    def __init__(self, peer: int, buffer: int, timeout: float) -> None:
        self.peer = peer
        self.buffer = buffer
        self.timeout = timeout

    @property
    def host(self) -> "Channel":
        """The channel to the same peer for tensors in host memory."""
        return self

    @abstractmethod
    def send(self, key: Key, tensor: Tensor) -> None:
        """Hand a tensor over; blocks only while the stream's buffer is full."""

    def expect(self, key: Key, shape: Sequence[int], dtype: torch.dtype, device: torch.device = HOST) -> None:  # noqa: B027
        """Announce that this message will be received, so that its transfer can begin early."""

    @abstractmethod
    def receive(
        self, key: Key, shape: Sequence[int], dtype: torch.dtype, device: torch.device = HOST
    ) -> Tensor:
        """Wait for a message and return its tensor, which was sent with this shape and type.

        On a GPU it may be read by what follows on the current stream.
        """

    def release(self, key: Key) -> None:  # noqa: B027
        """Give the received tensor's memory back to the channel: it is not read any more."""

    def confirm(self, key: Key) -> None:  # noqa: B027
        """The peer is known to have taken this message: free what was kept for it."""

    @abstractmethod
    def leftovers(self) -> list[str]:
        """Messages that were sent and not confirmed, arrived and not taken, or taken and not released."""

    @abstractmethod
    def close(self) -> None:
        """Free everything; the peer's pending receives fail."""
