"""All channels keep the same promises: order by key, back-pressure, no copy left behind, a lost peer is named."""

import multiprocessing
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.fake_nccl import joined_pair
from vpipe.communication import Channel, InProcessHub, Key
from vpipe.communication.shared_memory import SharedMemoryChannel
from vpipe.errors import PeerError

PATIENT = 100.0
"""Seconds that nothing takes which goes well, on however busy a machine."""


def shared_memory_pair(buffer: int, timeout: float) -> tuple[Channel, Channel]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return (
        SharedMemoryChannel(1, buffer, timeout, left),
        SharedMemoryChannel(0, buffer, timeout, right),
    )


def in_process_pair(buffer: int, timeout: float) -> tuple[Channel, Channel]:
    hub = InProcessHub(2, timeout)
    return hub.join(0).channels(buffer)[1], hub.join(1).channels(buffer)[0]


@pytest.fixture(params=[shared_memory_pair, in_process_pair, joined_pair])
def pair(request: pytest.FixtureRequest) -> Iterator[Callable[..., tuple[Channel, Channel]]]:
    made: list[Channel] = []

    def make(buffer: int = 4, timeout: float = PATIENT) -> tuple[Channel, Channel]:
        channels = request.param(buffer, timeout)
        made.extend(channels)
        return channels

    yield make
    for channel in made:
        channel.close()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 5),
        torch.randn(64, 128, dtype=torch.float64),
        torch.randn(40, 50).t(),
        torch.randn(300, 300).bfloat16(),
        torch.arange(10),
        torch.tensor(True),
        torch.empty(0, 7),
        torch.randn(500, 700)[::2, ::3],
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}",
)
def test_a_tensor_arrives_as_it_was_sent(pair: Callable, tensor: torch.Tensor) -> None:
    a, b = pair()
    a.send(Key(0, 7), tensor)
    received = b.receive(Key(0, 7), tensor.shape, tensor.dtype)
    assert received.dtype == tensor.dtype
    assert torch.equal(received, tensor)
    b.release(Key(0, 7))
    assert a.leftovers() == b.leftovers() == []


def test_messages_are_taken_by_key_and_not_by_order(pair: Callable) -> None:
    a, b = pair(buffer=8)
    tensors = {Key(s, n): torch.full((400,), 10.0 * s + n) for s in range(2) for n in range(4)}
    for key, tensor in tensors.items():
        a.send(key, tensor)
    for key, tensor in reversed(tensors.items()):
        assert torch.equal(b.receive(key, (400,), torch.float32), tensor)
        b.release(key)


def test_both_directions_at_once(pair: Callable) -> None:
    a, b = pair()
    a.send(Key(0, 0), torch.ones(1000))
    b.send(Key(0, 0), torch.zeros(1000))
    assert a.receive(Key(0, 0), (1000,), torch.float32).sum() == 0
    assert b.receive(Key(0, 0), (1000,), torch.float32).sum() == 1000


def test_a_full_stream_holds_up_its_sender_until_a_message_is_taken(pair: Callable) -> None:
    a, b = pair(buffer=2)
    sent: list[int] = []
    two = threading.Event()

    def sender() -> None:
        for number in range(5):
            a.send(Key(3, number), torch.full((2000,), float(number)))
            sent.append(number)
            if number == 1:
                two.set()

    thread = threading.Thread(target=sender)
    thread.start()
    assert two.wait(PATIENT)
    thread.join(0.1)
    assert sent == [0, 1]
    for number in range(5):
        assert b.receive(Key(3, number), (2000,), torch.float32)[0] == number
    thread.join()
    assert sent == [0, 1, 2, 3, 4]


def test_waiting_too_long_names_the_peer_and_the_message(pair: Callable) -> None:
    a, _ = pair(timeout=0.1)
    with pytest.raises(PeerError, match=r"waited 0.1 s for rank 1: message Key\(stream=2, number=9\)"):
        a.receive(Key(2, 9), (1,), torch.float32)


def test_what_was_not_taken_is_a_leftover(pair: Callable) -> None:
    a, b = pair()
    a.send(Key(1, 2), torch.ones(3))
    assert any("number=2" in line for line in b.leftovers())


@pytest.mark.parametrize("make", [shared_memory_pair, joined_pair])
def test_a_lost_peer_is_named_and_what_it_had_sent_still_arrives(make: Callable) -> None:
    a, b = make(4, PATIENT)
    a.send(Key(0, 0), torch.ones(5000))
    a.close()
    assert b.receive(Key(0, 0), (5000,), torch.float32).sum() == 5000
    with pytest.raises(PeerError, match="rank 0 closed its connection"):
        b.receive(Key(0, 1), (5000,), torch.float32)


def test_the_last_message_of_a_peer_arrives_though_notices_cannot_be_sent_to_it() -> None:
    a, b = shared_memory_pair(buffer=8, timeout=PATIENT)
    a.send(Key(0, 0), torch.ones(2))
    b.receive(Key(0, 0), (2,), torch.float32)  # a's notice waits
    a.send(Key(0, 1), torch.ones(3))
    a.close()
    read, looked = b._pump, []

    def read_too_early_the_first_time() -> None:
        if looked:
            read()
        looked.append(True)

    b._pump = read_too_early_the_first_time  # type: ignore[method-assign]
    assert b.receive(Key(0, 1), (3,), torch.float32).tolist() == [1, 1, 1]
    b.close()


def test_slots_are_used_again_and_the_receiver_reads_them_in_place() -> None:
    a, b = shared_memory_pair(4, PATIENT)
    for number in range(20):
        a.send(Key(0, number), torch.full((5000,), float(number)))
        received = b.receive(Key(0, number), (5000,), torch.float32)
        assert received[-1] == number
        b.release(Key(0, number))
    assert len(a._slots) == 1
    assert len(b._peer_slots) == 1


def _echo(link: socket.socket) -> None:
    channel = SharedMemoryChannel(0, 4, PATIENT, link)
    for number in range(50):
        tensor = channel.receive(Key(0, number), (3000,), torch.float32)
        channel.send(Key(1, number), tensor * 2)
        channel.release(Key(0, number))
    channel.receive(Key(0, 50), (1,), torch.float32)


def test_two_processes_exchange_through_shared_memory() -> None:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = multiprocessing.get_context("fork").Process(target=_echo, args=(right,), daemon=True)
    process.start()
    right.close()
    try:
        channel = SharedMemoryChannel(1, 4, PATIENT, left)
        for number in range(50):
            channel.send(Key(0, number), torch.full((3000,), float(number)))
            assert channel.receive(Key(1, number), (3000,), torch.float32)[0] == 2 * number
            channel.release(Key(1, number))
        channel.send(Key(0, 50), torch.zeros(1))
        process.join(PATIENT)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
