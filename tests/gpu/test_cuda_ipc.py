"""Tensors of the CUDA IPC channel lie with their receiver: slots are used again before anything is released. They
lie in ordinary memory, whatever the allocator does for the rest."""

import pytest
import torch

from tests.gpu.tasks import GPU
from tests.multiprocess.pool import Pool
from vpipe.communication import Key, ProcessWorld
from vpipe.communication.cuda_ipc import CudaIpcChannel
from vpipe.system.environment import ALLOCATOR

MESSAGES, BUFFER, SIZE = 40, 4, 3001


def exchange() -> tuple[int, list[float]]:
    """How many slots the first rank has made; what the second holds when all has come and nothing is released."""
    world, device = ProcessWorld("cuda_ipc", timeout=60.0), torch.device(GPU)
    (channel,) = world.channels(BUFFER, device).values()
    assert isinstance(channel, CudaIpcChannel)
    tried = len(channel._device_slots)  # by the trial copies
    held = []
    for number in range(MESSAGES):
        if world.rank == 0:
            channel.send(Key(0, number), torch.full((SIZE,), float(number), device=device))
            channel.receive(Key(1, number), (1,), torch.float64)
        else:
            held.append(channel.receive(Key(0, number), (SIZE,), torch.float32, device))
            torch.cuda.synchronize(device)  # the slot is free, and its GPU is done with it
            channel.send(Key(1, number), torch.zeros(1, dtype=torch.float64))
    slots = len(channel._device_slots) - tried
    found = [tensor.unique().item() for tensor in held]
    world.all_gather("done", world.rank)
    channel.close()
    world.close()
    return slots, found


def exchange_with_expandable_segments() -> list[bool]:
    """Of a tensor, the first slot and a second tensor: whether they lie in such a segment."""
    world, device = ProcessWorld("cuda_ipc", timeout=60.0), torch.device(GPU)
    (channel,) = world.channels(BUFFER, device).values()
    assert isinstance(channel, CudaIpcChannel)
    settings = "expandable_segments:True"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ALLOCATOR[0], settings)
        torch._C._accelerator_setAllocatorSettings(settings)
        torch.cuda.empty_cache()
        before = torch.full((SIZE * 1000,), 1.0, device=device)
        channel.send(Key(0, 0), before)
        after = torch.ones(SIZE * 2000, device=device)
        received = channel.receive(Key(0, 0), before.shape, torch.float32, device)
        assert received.eq(1.0).all()
        found = [is_expandable(tensor) for tensor in (before, channel._device_slots[-1].buffer, after)]
        world.all_gather("done", world.rank)
        channel.close()
        world.close()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    return found


def is_expandable(tensor: torch.Tensor) -> bool:
    place = tensor.data_ptr()
    (segment,) = (
        segment
        for segment in torch.cuda.memory_snapshot()
        if segment["address"] <= place < segment["address"] + segment["total_size"]
    )
    return segment["is_expandable"]


def test_a_slot_lies_in_ordinary_memory_between_expandable_segments(pool: Pool) -> None:
    assert pool.run(2, exchange_with_expandable_segments, timeout=100) == [[True, False, True]] * 2


def test_a_receiver_holds_messages_in_memory_of_its_own(pool: Pool) -> None:
    (slots, _), (_, found) = pool.run(2, exchange, timeout=100)
    assert found == [float(number) for number in range(MESSAGES)]
    assert slots <= 2


def slots_of_the_trial() -> int:
    world, device = ProcessWorld("cuda_ipc", timeout=60.0), torch.device(GPU)
    (channel,) = world.channels(BUFFER, device).values()
    assert isinstance(channel, CudaIpcChannel)
    slots = len(channel._device_slots)
    world.all_gather("done", world.rank)
    channel.close()
    world.close()
    return slots


def test_trial_copies_use_one_slot_twice(pool: Pool) -> None:
    """So the event by which the receiver gives it back is tried too."""
    assert pool.run(2, slots_of_the_trial, timeout=100) == [1, 1]
