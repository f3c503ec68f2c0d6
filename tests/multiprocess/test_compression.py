"""Compressed messages between processes over gloo, as if each were on a host of its own."""

import pytest

from tests.multiprocess import tasks
from tests.multiprocess.pool import Pool
from vpipe.communication import ProcessWorld
from vpipe.communication import world as world_module
from vpipe.communication.choice import location_of
from vpipe.pipeline.threads import run_ranks


def train(data: list[tasks.Batch], compress: str, hosts: int) -> tuple[list[tuple[int, float]], int, str]:
    world = ProcessWorld("auto", timeout=100.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            world_module,
            "location_of",
            lambda device: location_of(device)._replace(host=f"host{world.rank % hosts}"),
        )
        with tasks.make_pipeline("1f1b", world, compress=compress) as pipe:
            losses = list(pipe.train(data))
            return losses, pipe.handler.bytes_sent, ", ".join(set(pipe.handler.channel_names.values()))


def test_messages_between_hosts_are_compressed_as_between_threads(pool: Pool, capture_once: None) -> None:
    """To the bit: receives were posted ahead with the size of what is sent."""
    data = tasks.batches(8)
    tasks.bert()  # before the threads, which would each build one
    expected, _ = run_ranks(2, lambda world: tasks.train("1f1b", data, world=world, compress="int4"))[0]
    for losses, _, channel in pool.run(2, train, data, "int4", 2):
        assert channel == "gloo"
        assert losses == expected


def test_messages_within_a_host_are_not(pool: Pool) -> None:
    data = tasks.batches(4)
    plain, wanted = (pool.run(2, train, data, compress, 1) for compress in ("none", "int8"))
    assert plain == wanted
    assert {channel for _, _, channel in plain} == {"shared memory"}
