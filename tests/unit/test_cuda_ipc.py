"""The CUDA IPC channel as far as no GPU is needed: which slot is taken, until when the receiver needs it, and trials.

The GPU of the trials is the host: what is copied to it goes through shared memory.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from vpipe.communication import Key
from vpipe.communication.channel import HOST
from vpipe.communication.cuda_ipc import (
    FIRST,
    GRAIN,
    SPARE,
    TRIAL_SIZE,
    CudaIpcChannel,
    _Slot,
    choose_slot,
)
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


class CannotOffer(CudaIpcChannel):
    """One whose memory cannot be given to others."""

    def send(self, key: Key, tensor: torch.Tensor) -> None:
        if key.stream < 0 and tensor.any() and tensor.numel() == TRIAL_SIZE:
            self._wait_for_room(key)
            raise RuntimeError("CUDA error: invalid argument")
        super().send(key, tensor)


class CannotOpen(CudaIpcChannel):
    """One that cannot open the peer's memory: every message in a slot is one of device memory to it."""

    def _data(self, slot: int, size: int, payload: bytes, descriptors: list[int]) -> torch.Tensor:
        if slot < 0:
            return super()._data(slot, size, payload, descriptors)
        return super()._data(FIRST + slot, size, b"handles", descriptors)

    def _open(self, handles: bytes) -> _Slot:
        raise RuntimeError("CUDA error: invalid device context")


class ReadsWrong(CudaIpcChannel):
    """One whose GPU reads something else, as behind some bridges."""

    def receive(self, key: Key, shape: Any, dtype: torch.dtype, device: torch.device = HOST) -> torch.Tensor:
        found = super().receive(key, shape, dtype, device)
        return found + 1 if found.numel() == TRIAL_SIZE else found


@pytest.mark.parametrize("buffer", [1, 8])
@pytest.mark.parametrize(
    ("one", "other", "works"),
    [
        (CudaIpcChannel, CudaIpcChannel, True),
        (CannotOffer, CudaIpcChannel, False),
        (CudaIpcChannel, CannotOpen, False),
        (CannotOffer, CannotOpen, False),
        (CudaIpcChannel, ReadsWrong, False),
    ],
)
def test_both_ends_learn_whether_a_trial_copy_arrived_both_ways(
    one: type[CudaIpcChannel],
    other: type[CudaIpcChannel],
    works: bool,
    buffer: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ends = [one(1, buffer, 100.0, left, HOST), other(0, buffer, 100.0, right, HOST)]
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda end: end.try_out(), ends)) == [works, works]
    if works:
        assert [end.leftovers() for end in ends] == [[], []]
        assert [len(end._slots) for end in ends] == [1, 1]  # used again: so was what says that it is free
    for end in ends:
        end.close()


def test_a_slot_is_opened_for_the_gpu_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever number the sender knows its own by: the two processes may see different GPUs."""
    opened: list[Any] = []

    def new_shared(*given: Any) -> torch.UntypedStorage:
        opened.extend(given)
        return torch.UntypedStorage(GRAIN)

    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", new_shared)
    monkeypatch.setattr(torch.cuda.Event, "from_ipc_handle", lambda device, handle: (device, handle))
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right:
        reader = CudaIpcChannel(0, 4, 5.0, right, torch.device("cuda:2"))
        slot = reader._open(json.dumps(["aabb", GRAIN, 0, "cc"]).encode())
    assert opened == [2, b"\xaa\xbb", GRAIN, 0]
    assert slot.event == (torch.device("cuda:2"), b"\xcc")
