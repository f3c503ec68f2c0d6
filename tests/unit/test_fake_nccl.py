"""The stand-in for NCCL finds the deadlocks that cards would have, and no others."""

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch

from tests.examples import example, varied
from tests.fake_nccl import SCHEDULES, DeadlockError, FakeNccl, OldHub, run_on
from vpipe import Pipeline
from vpipe.weights import optimizer_factory

T = TypeVar("T")


def train(hub: OldHub, schedule: str, **options: Any) -> list[list[float]]:
    model, batch, loss_fn = example("sequential", layers=4)

    def work(world: Any) -> list[float]:
        sgd = optimizer_factory("sgd", 0.1)
        with Pipeline(
            model, batch, optimizer=sgd, loss_fn=loss_fn, schedule=schedule, world=world, **options
        ) as pipe:
            return [loss for _, loss in pipe.train(varied(batch, 8))]

    return run_on(hub, work)


@pytest.mark.parametrize("look_ahead", [True, False])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_communicators_that_are_joined_at_their_first_message_hang(
    capture_once: None, schedule: str, look_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Receives that are posted ahead do it, and without them losses that go from card to card."""
    if not look_ahead:
        monkeypatch.setattr("vpipe.runtime.prefetch.AHEAD", 0)
    with pytest.raises(DeadlockError, match="the others to join"):
        train(OldHub(2, numbers=not look_ahead), schedule, **SCHEDULES[schedule])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_they_train_once_all_are_joined(capture_once: None, schedule: str) -> None:
    hub = OldHub(2, warm=True)
    first, second = train(hub, schedule, **SCHEDULES[schedule])
    assert first == second
    assert hub.nccl.host_waits, "each of them blocked the host"


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_replicas_that_send_both_ways_on_one_communicator_hang(capture_once: None, schedule: str) -> None:
    with pytest.raises(
        DeadlockError, match=r"rank 0 waits for the receive on .*rank 1 waits for the receive on"
    ):
        train(OldHub(2, warm=True), schedule, replicas=(2,), **SCHEDULES[schedule])


def two_ranks(work: Callable[[FakeNccl, int], T]) -> list[T]:
    hub = OldHub(2)
    return run_on(hub, lambda world: work(hub.nccl, world.rank))


def test_a_transfer_is_the_receivers_when_both_have_joined_and_posted() -> None:
    def work(nccl: FakeNccl, rank: int) -> list[float]:
        group, tensor = nccl.group("pair", range(2), rank), torch.full((3,), float(rank))
        (group.send if rank == 0 else group.recv)([tensor], 1 - rank, 0).wait()
        group.allreduce([total := torch.full((2,), rank + 1.0)]).wait()
        return [*tensor.tolist(), *total.tolist()]

    assert two_ranks(work) == [[0, 0, 0, 3, 3]] * 2


def test_two_sends_that_face_each_other_never_end() -> None:
    def work(nccl: FakeNccl, rank: int) -> None:
        group, other = nccl.group("pair", range(2), rank), 1 - rank
        group.send([torch.ones(2)], other, 0)
        group.recv([torch.empty(2)], other, 0).wait()

    with pytest.raises(DeadlockError):
        two_ranks(work)


def test_two_communicators_that_are_joined_in_different_orders_never_end() -> None:
    def work(nccl: FakeNccl, rank: int) -> None:
        for name in ("a", "b") if rank == 0 else ("b", "a"):
            nccl.group(name, range(2), rank).allreduce([torch.ones(2)])

    with pytest.raises(DeadlockError, match="the others to join"):
        two_ranks(work)


def test_a_message_that_nobody_takes_holds_up_those_behind_it() -> None:
    def work(nccl: FakeNccl, rank: int) -> bool:
        group, other = nccl.group("pair", range(2), rank), 1 - rank
        if rank:
            group.recv([torch.empty(2)], other, 0).wait()
            return True
        sent = [group.send([torch.ones(2)], other, 0) for _ in range(2)]
        sent[0].wait()
        return sent[1].is_completed()

    assert two_ranks(work) == [False, True]
