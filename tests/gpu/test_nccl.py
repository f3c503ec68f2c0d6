"""NCCL with one rank: what torch calls by the names that we use is there, takes our options, and ends.

Each test is a process of its own with a limit: what hangs is killed.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.gpu.tasks import GPU
from tests.multiprocess.pool import Pool
from vpipe.communication.nccl import CONNECTIONS, MAX_CTAS, Communicators, nccl_groups
from vpipe.communication.rendezvous.job import join

pytestmark = pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
LIMIT = 120.0
LONG = int(4e9)
"""Cycles of the GPU: a few seconds."""


def communicators(world: int = 0) -> Communicators:
    """Those of a job of one rank, which meets as all jobs do: torch calls our store from threads of its own."""
    torch.cuda.set_device(GPU)
    store = dist.PrefixStore(f"world {world}", join(0, 1, LIMIT).store)
    return Communicators(0, 1, nccl_groups(0, store, LIMIT), torch.device(GPU))


def options() -> list[Any]:
    torch.cuda.set_device(GPU)
    group: Any = nccl_groups(0, dist.HashStore(), LIMIT)("up", [0])
    found = group.options
    said = [found.config.max_ctas, found.is_high_priority_stream, found._timeout.total_seconds()]
    group.shutdown()
    return said


def test_the_options_are_taken(pool: Pool) -> None:
    assert pool.run(1, options, timeout=LIMIT) == [[MAX_CTAS, True, LIMIT]]


def all_reduce() -> tuple[list[float], bool, bool]:
    """The sum over one rank; whether it was done when `wait` returned; whether it was done after the GPU was."""
    made = communicators()
    made.open([], [(0,)])
    tensor = torch.arange(1000.0, device=GPU)
    tensor.add_(1.0).mul(2.0).sub_(1.0)  # a kernel that is loaded at its first use may wait for an idle GPU
    made.all_reduce(torch.ones(1000, device=GPU), (0,)).wait()
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    work = made.all_reduce(tensor, (0,))
    work.wait()
    doubled = tensor.mul(2.0)
    early = work.is_completed()
    torch.cuda.synchronize()
    late = work.is_completed()
    made.close(failed=False)
    return doubled[:3].tolist(), early, late


def test_a_wait_lets_the_stream_wait_and_the_host_go_on(pool: Pool) -> None:
    assert pool.run(1, all_reduce, timeout=LIMIT) == [([2.0, 4.0, 6.0], False, True)]


def send_to_itself() -> list[float]:
    """NCCL lets a rank send to itself where both ends are posted together."""
    torch.cuda.set_device(GPU)
    group: Any = nccl_groups(0, dist.HashStore(), LIMIT)("up", [0])
    sent, received = torch.full((5000,), 3.0, device=GPU), torch.zeros(5000, device=GPU)
    group._start_coalescing()
    group.send([sent], 0, 0)
    group.recv([received], 0, 0)
    group._end_coalescing().wait()
    found = received[[0, -1]].tolist()
    group.shutdown()
    return found


def test_a_message_to_itself(pool: Pool) -> None:
    assert pool.run(1, send_to_itself, timeout=LIMIT) == [[3.0, 3.0]]


def fail_while_it_runs() -> bool:
    """After a failure the communicators are aborted, though the GPU is at work."""
    made = communicators()
    made.open([], [(0,)])
    torch.cuda._sleep(LONG)
    made.all_reduce(torch.ones(1000, device=GPU), (0,))
    made.close(failed=True)
    return True


def test_communicators_are_aborted_after_a_failure(pool: Pool) -> None:
    assert pool.run(1, fail_while_it_runs, timeout=LIMIT) == [True]


def open_twice() -> list[float]:
    """A script may train two pipelines, one after the other."""
    found = []
    for number in (1, 2):
        made = communicators(number)
        made.open([], [(0,)])
        made.all_reduce(tensor := torch.full((4,), float(number), device=GPU), (0,)).wait()
        found.append(tensor[0].item())
        made.close(failed=False)
    return found


def test_communicators_can_be_made_again(pool: Pool) -> None:
    assert pool.run(1, open_twice, timeout=LIMIT) == [[1.0, 2.0]]


def train_with_eager_modules() -> list[float]:
    """Kernels are loaded at the start, and the GPU looks at as many queues as there are."""
    weights = torch.ones(64, 64, device=GPU, requires_grad=True)
    (weights @ weights).sum().backward()
    assert weights.grad is not None
    return [weights.grad[0, 0].item()]


def test_eager_module_loading_and_many_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", CONNECTIONS)
    pool = Pool(forked=False)
    try:
        assert pool.run(1, train_with_eager_modules, timeout=LIMIT) == [[128.0]]
    finally:
        pool.close()
