"""The channel for NCCL, on gloo: transfers without tags, in an order that both ends keep by themselves."""

from typing import Any

import pytest
import torch

from tests.multiprocess import tasks
from tests.multiprocess.pool import Pool
from vpipe.communication import HOST, Channel, Key, ProcessWorld
from vpipe.communication.distributed import GroupChannel
from vpipe.pipeline.threads import run_ranks


class HostGroupChannel(GroupChannel):
    """Every tensor goes over the groups, as those of GPUs do."""

    def _route(self, tensor: torch.Tensor, key: Key) -> tuple[Any, int]:
        return self._groups[key.stream], 0


class GroupWorld(ProcessWorld):
    """Ranks that are joined as GPUs of a host would be, with host tensors and gloo."""

    def channels(self, buffer: int, device: torch.device = HOST) -> dict[int, Channel]:
        self._group_backend = "gloo"
        others = (peer for peer in range(self.size) if peer != self.rank)
        return {peer: HostGroupChannel(peer, buffer, 600.0, None, self._groups) for peer in others}


def train_over_groups(schedule: str, data: list[tasks.Batch], **options: Any) -> Any:
    return tasks.train(schedule, data, world=GroupWorld(timeout=600.0), **options)


# Interleaved: the two ranks exchange several tensors in each direction, and do not post them in the same order.
@pytest.mark.parametrize(("schedule", "options"), [("interleaved", {"chunks": 2}), ("pipedream", {})])
def test_streams_keep_their_order(
    pool: Pool, capture_once: None, schedule: str, options: dict[str, Any]
) -> None:
    data = tasks.batches(8)
    tasks.bert()  # before the threads, which would each build one
    expected, state = run_ranks(2, lambda world: tasks.train(schedule, data, world=world, **options))[0]
    results = pool.run(2, train_over_groups, schedule, data, **options)
    for losses, _ in results:
        assert [loss for _, loss in losses] == pytest.approx([loss for _, loss in expected], rel=1e-6)
    weights = results[0][1]
    for name, tensor in state.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-6, atol=1e-8, msg=name)
