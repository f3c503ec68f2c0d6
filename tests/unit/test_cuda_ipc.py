"""The CUDA IPC channel as far as no GPU is needed: which slot is taken, and until when the receiver needs it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from vpipe.communication import Key
from vpipe.communication.channel import HOST
from vpipe.communication.cuda_ipc import FIRST, SPARE, CudaIpcChannel, _Slot, choose_slot
from vpipe.communication.shared_memory import SharedMemoryChannel


class Event:
    """A slot's event as its two sides see it: the message is there once it was waited for, gone once it is recorded."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer

    def record(self, stream: Stream) -> None:
        self.buffer.fill_(255)  # by the next message


class Stream:
    def wait_event(self, event: Event) -> None:
        event.buffer.copy_(torch.arange(event.buffer.numel()))


class Sender(SharedMemoryChannel):
    """The other end, which writes down what it is given back."""

    freed: list[int]

    def _take_back(self, slot: int) -> None:
        self.freed.append(slot)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Sender, CudaIpcChannel]]:
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sender, receiver = Sender(1, 4, 5.0, left), CudaIpcChannel(0, 4, 5.0, right, HOST)
    sender.freed = []
    yield sender, receiver
    sender.close()
    receiver.close()


def test_a_received_tensor_lies_in_memory_of_its_own_and_its_slot_is_free(
    ends: tuple[Sender, CudaIpcChannel],
) -> None:
    sender, receiver = ends
    key, slot = Key(0, 7), FIRST + 3
    buffer = torch.zeros(64, dtype=torch.uint8)
    event: Any = Event(buffer)
    receiver._peer_device_slots[slot] = _Slot(buffer, event)
    receiver._arrived[key] = (buffer[:12], slot)
    tensor = receiver.receive(key, (3, 1), torch.int32)
    assert torch.equal(tensor, torch.arange(12, dtype=torch.uint8).view(torch.int32).view(3, 1))
    assert receiver.leftovers() == sender.leftovers() == []  # all notices are sent and read
    assert sender.freed == [slot]
    receiver.release(key)  # when backward is done
    assert receiver.leftovers() == sender.leftovers() == []
    assert sender.freed == [slot]


def test_a_slot_whose_gpu_is_behind_is_waited_for_only_if_many_are() -> None:
    large = SPARE // 2
    assert choose_slot([], large, lambda slot: True) is None
    assert choose_slot([4, 7], large, lambda slot: slot == 7) == 7
    assert choose_slot([4], large, lambda slot: False) is None
    assert choose_slot([4, 7], large, lambda slot: False) == 4
