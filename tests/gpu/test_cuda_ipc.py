"""What comes over the CUDA IPC channel lies with its receiver: slots are used again before anything is released."""

import torch

from tests.gpu.tasks import GPU
from tests.multiprocess.pool import Pool
from vpipe.communication import Key, ProcessWorld
from vpipe.communication.cuda_ipc import CudaIpcChannel

MESSAGES, BUFFER, SIZE = 40, 4, 3001


def exchange() -> tuple[int, list[float]]:
    """How many slots the first rank has made; what the second holds when all has come and nothing is released."""
    world, device = ProcessWorld("cuda_ipc", timeout=60.0), torch.device(GPU)
    (channel,) = world.channels(BUFFER, device).values()
    assert isinstance(channel, CudaIpcChannel)
    held = []
    for number in range(MESSAGES):
        if world.rank == 0:
            channel.send(Key(0, number), torch.full((SIZE,), float(number), device=device))
            channel.receive(Key(1, number), (1,), torch.float64)
        else:
            held.append(channel.receive(Key(0, number), (SIZE,), torch.float32, device))
            torch.cuda.synchronize(device)  # the slot is free, and its GPU is done with it
            channel.send(Key(1, number), torch.zeros(1, dtype=torch.float64))
    slots = len(channel._device_slots)
    found = [tensor.unique().item() for tensor in held]
    world.all_gather("done", world.rank)
    channel.close()
    world.close()
    return slots, found


def test_a_receiver_holds_messages_in_memory_of_its_own(pool: Pool) -> None:
    (slots, _), (_, found) = pool.run(2, exchange, timeout=100)
    assert found == [float(number) for number in range(MESSAGES)]
    assert slots <= 2
