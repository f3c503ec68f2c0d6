"""The channel through host memory, with GPU and network played by the test."""

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from vpipe.communication import Key, distributed
from vpipe.communication.distributed import StagedChannel
from vpipe.errors import PeerError

SHORT, PATIENT = 0.1, 100.0


class OnGpu(Tensor):
    """A host tensor that says it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


class Transfer:
    """A message that gloo was given: it ends when the peer takes it."""

    def __init__(self, tensor: Tensor, peer: int, tag: int) -> None:
        self.value = tensor.clone()
        self.taken = threading.Event()

    def wait(self, timeout: timedelta) -> None:
        if not self.taken.wait(timeout.total_seconds()):
            raise RuntimeError("timed out")


class Machine:
    """What the channel has requested, and whether the GPU makes copies."""

    def __init__(self) -> None:
        self.pinned: list[tuple[int, ...]] = []
        self.copies = threading.Event()
        self.copies.set()
        self.transfers: list[Transfer] = []

    def pin(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self.pinned.append(shape)
        return torch.empty(shape, dtype=dtype)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Transfer:
        """As a process group has it."""
        self.transfers.append(Transfer(tensors[0], peer, tag))
        return self.transfers[-1]

    def event(self) -> Any:
        copies = self.copies

        class Event:
            def record(self, stream: Any) -> None: ...

            def synchronize(self) -> None:
                assert copies.wait(PATIENT)

        return Event()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(distributed, "_pinned", made.pin)
    yield made
    made.copies.set()  # or the channel's thread would wait on


def message(number: float) -> Tensor:
    return torch.full((3,), number).as_subclass(OnGpu)


def started(channel: StagedChannel) -> None:
    """Wait until gloo was given all messages."""
    assert channel._newest is not None
    channel._newest.result()


def test_a_full_stream_takes_no_more_memory_until_a_message_is_taken(machine: Machine) -> None:
    channel = StagedChannel(1, 2, SHORT, machine, torch.device("cpu"))
    for number in range(2):
        channel.send(Key(0, number), message(number))
    with pytest.raises(PeerError, match=r"rank 1 did not answer: room to send Key\(stream=0, number=2\)"):
        channel.send(Key(0, 2), message(2))
    assert len(machine.pinned) == 2
    channel.timeout = PATIENT
    channel.send(Key(1, 0), message(9))  # another stream has room of its own
    started(channel)
    machine.transfers[0].taken.set()
    channel.send(Key(0, 2), message(2))
    started(channel)
    for transfer in machine.transfers:
        transfer.taken.set()
    assert channel.leftovers() == []
    assert [transfer.value[0].item() for transfer in machine.transfers] == [0, 1, 9, 2]
    channel.close()


def test_copies_that_the_gpu_has_not_made_count_too(machine: Machine) -> None:
    machine.copies.clear()
    channel = StagedChannel(1, 2, SHORT, machine, torch.device("cpu"))
    for number in range(2):
        channel.send(Key(0, number), message(number))
    with pytest.raises(PeerError, match=r"room to send .*the GPU has not copied it to the host"):
        channel.send(Key(0, 2), message(2))
    assert len(machine.pinned) == 2
    assert machine.transfers == []
    channel.close()


def test_a_confirmed_message_makes_room(machine: Machine) -> None:
    channel = StagedChannel(1, 1, PATIENT, machine, torch.device("cpu"))
    channel.send(Key(0, 0), message(0))
    started(channel)
    machine.transfers[0].taken.set()
    channel.confirm(Key(0, 0))
    assert not channel._sent[0]
    channel.close()


def test_a_transfer_that_cannot_start_is_raised_at_the_next_send(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(tensors: list[Tensor], peer: int, tag: int) -> Transfer:
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(machine, "send", refuse)
    channel = StagedChannel(1, 8, PATIENT, machine, torch.device("cpu"))
    channel.send(Key(0, 0), message(0))
    channel._newest.exception()  # type: ignore[union-attr]
    with pytest.raises(PeerError, match=r"rank 1 did not answer: message .* \(Connection reset by peer"):
        channel.send(Key(1, 0), message(1))
    channel.close()
