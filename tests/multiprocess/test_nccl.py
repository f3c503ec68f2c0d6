"""Training over NCCL by processes, as a stand-in over sockets keeps its rules."""

from typing import Any

import pytest
import torch

from tests.multiprocess import tasks
from tests.multiprocess.nccl_over_sockets import SocketGroup, SocketWorld
from tests.multiprocess.pool import Pool
from vpipe.communication import ProcessWorld
from vpipe.pipeline.threads import run_ranks

SHORT = 0.5


def train(schedule: str, data: list[tasks.Batch], **options: Any) -> Any:
    return tasks.train_and_evaluate(schedule, data, world=SocketWorld(), **options)


def long(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("schedule", "ranks", "options"),
    [
        ("zb-v", 2, {}),
        ("pipedream", 3, {"replicas": (2, 1)}),
        long("gpipe", 2, {}),
        long("1f1b", 3, {"replicas": (2, 1)}),
        long("interleaved", 2, {"chunks": 2}),
        long("zb-h1", 3, {}),
        long("2bw", 2, {}),
    ],
)
def test_processes_train_as_threads_do(
    pool: Pool, capture_once: None, schedule: str, ranks: int, options: dict[str, Any]
) -> None:
    data = tasks.batches(16 if schedule in tasks.SYNCHRONOUS else 8)
    tasks.bert()  # before the threads, which would each build one
    threads = run_ranks(ranks, lambda world: tasks.train_and_evaluate(schedule, data, world=world, **options))
    expected, state = threads[0]
    results = pool.run(ranks, train, schedule, data, **options)
    for seen, _ in results:
        assert [loss for _, loss in seen] == pytest.approx([loss for _, loss in expected], rel=1e-6)
    weights = results[0][1]
    for name, tensor in state.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-6, atol=1e-8, msg=name)


def face_each_other() -> list[bool]:
    """Both send, then both receive, on one communicator; then on two."""
    world = ProcessWorld(timeout=100.0)
    other, ones = 1 - world.rank, torch.ones(100)
    one, up, down = (SocketGroup(world, name, (0, 1)) for name in ("one", "up", "down"))
    stuck = one.send([ones], other, 0)
    one.recv([torch.empty(100)], other, 0)
    there, back = (up, down) if world.rank == 0 else (down, up)
    if world.rank == 0:
        sent, received = there.send([ones], other, 0), back.recv([torch.empty(100)], other, 0)
    else:  # the hosts join in one order
        received, sent = back.recv([torch.empty(100)], other, 0), there.send([ones], other, 0)
    sent.wait()
    received.wait()
    found = [stuck.done.wait(SHORT), sent.is_completed(), received.is_completed()]
    world.all_gather("done", None)
    world.close()
    return found


def test_the_stand_in_hangs_where_both_send_on_one_communicator(pool: Pool) -> None:
    assert pool.run(2, face_each_other) == [[False, True, True]] * 2
