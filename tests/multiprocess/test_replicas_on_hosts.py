"""Replicas on several hosts: their gradients are summed inside each host, then between hosts, beside the backward."""

import pytest
import torch

from tests.multiprocess import tasks
from tests.multiprocess.pool import Pool
from vpipe.communication import InProcessHub, ProcessWorld
from vpipe.communication import world as world_module
from vpipe.communication.choice import location_of
from vpipe.pipeline.threads import run_ranks
from vpipe.runtime import buckets

HOSTS = "aabb"  # replicas on ranks 0 to 2, the other stage on rank 3
Losses = list[tuple[int, float]]


def train(data: list[tasks.Batch], hosts: str) -> tuple[Losses, tasks.State, set[str]]:
    world = ProcessWorld("auto", timeout=100.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "BUCKET", 1024)
        patch.setattr(
            world_module,
            "location_of",
            lambda device: location_of(device)._replace(host=hosts[world.rank]),
        )
        with tasks.make_pipeline("1f1b", world, replicas=(3, 1)) as pipe:
            losses, state = list(pipe.train(data)), pipe.full_state_dict()
            return losses, state, set(pipe.handler.channel_names.values())


def test_processes_equal_threads_to_the_bit(
    pool: Pool, capture_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over gloo in threads of the processes, and over the channels of threads."""
    data = tasks.batches(8)
    tasks.bert()  # before the threads, which would each build one
    monkeypatch.setattr(buckets, "BUCKET", 1024)
    hub = InProcessHub(4, hosts=HOSTS)
    losses, state = run_ranks(
        4, lambda world: tasks.train("1f1b", data, world=world, replicas=(3, 1)), hub=hub
    )[0]
    found = pool.run(4, train, data, HOSTS)
    assert found[0][2] == {"gloo", "shared memory"}
    for own, *_ in found:
        assert own == losses
    assert state is not None
    torch.testing.assert_close(found[0][1], state, rtol=0, atol=0)
