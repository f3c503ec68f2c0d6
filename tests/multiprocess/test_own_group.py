"""Our process group beside a user's, and channels where a trial copy fails: stand-ins for GPUs, real processes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg

from tests.multiprocess import tasks
from tests.multiprocess.pool import Pool
from vpipe.communication import HOST, Key, ProcessWorld
from vpipe.communication import world as world_module
from vpipe.communication.choice import RankLocation, host_identity
from vpipe.communication.cuda_ipc import TRIAL_SIZE, CudaIpcChannel
from vpipe.communication.distributed import DistributedChannel
from vpipe.pipeline.threads import run_ranks


def train_beside_another_group(data: list[tasks.Batch]) -> Any:
    """The user's default group delivers nothing to hosts, like one of NCCL alone."""
    world = ProcessWorld("gloo", timeout=100.0)
    assert fake_pg  # which has registered the backend
    dist.init_process_group("fake", store=dist.HashStore(), rank=world.rank, world_size=world.size)
    user = dist.group.WORLD
    try:
        losses, _ = tasks.train("1f1b", data, world=world)
        return losses, dist.is_initialized() and dist.group.WORLD is user
    finally:
        dist.destroy_process_group()


def test_a_users_own_group_is_neither_used_nor_ended(pool: Pool, capture_once: None) -> None:
    data = tasks.batches(8)
    tasks.bert()  # before the threads, which would each build one
    expected, _ = run_ranks(2, lambda world: tasks.train("1f1b", data, world=world))[0]
    for losses, untouched in pool.run(2, train_beside_another_group, data):
        assert [loss for _, loss in losses] == pytest.approx([loss for _, loss in expected], rel=1e-6)
        assert untouched


class Refused(CudaIpcChannel):
    """The trial copy of rank 1 from rank 0 does not arrive; its GPU is the host."""

    def __init__(self, *args: Any, across: bool) -> None:
        super().__init__(*args, across=across)
        self.fails = (self.peer, across) == (0, True)

    def receive(self, key: Key, shape: Any, dtype: torch.dtype, device: torch.device = HOST) -> torch.Tensor:
        found = super().receive(key, shape, dtype, device)
        return found + 1 if self.fails and found.numel() == TRIAL_SIZE else found


class ThroughHost(DistributedChannel):
    name = "staged"

    def __init__(self, peer: int, buffer: int, timeout: float, group: Any, device: torch.device) -> None:
        super().__init__(peer, buffer, timeout, group)


def exchange(cards: list[str], channel: str) -> tuple[list[str], list[float]]:
    """The channels to the others, and what came over them; every card is number 0 to its own rank."""
    with pytest.MonkeyPatch.context() as patch:
        world = ProcessWorld(channel, timeout=100.0)
        place = RankLocation(host_identity(), "7", cards[world.rank], [], False)
        patch.setattr(world_module, "location_of", lambda device: place)
        patch.setattr(world_module, "CudaIpcChannel", Refused)
        patch.setattr(world_module, "StagedChannel", ThroughHost)
        patch.setattr(torch.cuda, "ipc_collect", lambda: None)
        channels = world.channels(4, HOST)
        for one in channels.values():
            one.send(Key(0, 0), torch.full((3000,), float(world.rank)))
        got = [float(one.receive(Key(0, 0), (3000,), torch.float32)[-1]) for one in channels.values()]
        world.all_gather("done", None)
        for one in channels.values():
            one.close()
        world.close()
        return [one.name for one in channels.values()], got


def test_two_cards_that_are_both_number_0_and_do_not_reach_each_other(pool: Pool) -> None:
    """Ranks 0 and 1 fall back to host memory; rank 2 is on rank 0's card, and both agree about it."""
    ipc, staged = "CUDA IPC", "staged"
    found = pool.run(3, exchange, ["GPU-0", "GPU-1", "GPU-0"], "auto")
    # Of rank 2 only the copy from rank 0, on the same card, is sure to arrive in this stand-in.
    assert found == [([staged, ipc], [1.0, 2.0]), ([staged, ipc], [0.0, 2.0]), ([ipc, ipc], [0.0, 1.0])]


def test_a_channel_that_was_asked_for_and_fails_its_trial_is_an_error_on_both_ends(pool: Pool) -> None:
    outcomes = pool.outcomes(2, exchange, ["GPU-0", "GPU-1"], "cuda_ipc")
    for outcome in outcomes:
        assert outcome.error == "PeerError"
        assert "failed to, in a trial: use 'auto'" in outcome.text
