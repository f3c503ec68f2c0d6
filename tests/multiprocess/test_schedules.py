"""Ranks that are processes train as ranks that are threads do: every schedule, every channel.

The short suite has every schedule over one channel, and each of the other occasions with a synchronous schedule and
an asynchronous one, over another channel each.
"""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.multiprocess import tasks
from tests.multiprocess.against_threads import AgainstThreads
from tests.multiprocess.pool import Pool
from vpipe.communication import CommunicationHandler, ProcessWorld


def long(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.long)


SOME = [
    ("1f1b", "gloo"),
    ("pipedream", "shared_memory"),
    long("2bw", "gloo"),
    long("pipedream", "gloo"),
]


@pytest.mark.parametrize(
    ("schedule", "channel"),
    [
        ("gpipe", "gloo"),
        ("1f1b", "shared_memory"),
        ("interleaved", "gloo"),
        ("zb-h1", "shared_memory"),
        ("zb-v", "shared_memory"),
        ("pipedream", "gloo"),
        ("2bw", "shared_memory"),
        long("gpipe", "shared_memory"),
        long("1f1b", "gloo"),
        long("interleaved", "shared_memory"),
        long("zb-h1", "gloo"),
        long("zb-v", "gloo"),
        long("pipedream", "shared_memory"),
        long("2bw", "gloo"),
    ],
)
def test_every_schedule_over_every_channel(
    against_threads: AgainstThreads, schedule: str, channel: str
) -> None:
    against_threads(2, tasks.train, schedule, tasks.batches(12), channel=channel)


@pytest.mark.parametrize(
    ("schedule", "replicas", "channel"),
    [
        ("1f1b", (2, 1), "gloo"),
        ("pipedream", (2, 2), "shared_memory"),
        long("1f1b", (2, 1), "shared_memory"),
        long("1f1b", (2, 2), "shared_memory"),
        long("pipedream", (2, 1), "gloo"),
        long("pipedream", (2, 1), "shared_memory"),
    ],
)
def test_replicas(
    against_threads: AgainstThreads, schedule: str, replicas: tuple[int, ...], channel: str
) -> None:
    against_threads(
        sum(replicas), tasks.train, schedule, tasks.batches(12), replicas=replicas, channel=channel
    )


@pytest.mark.parametrize(("schedule", "channel"), [*SOME, long("zb-v", "gloo")])
def test_lengths_vary_the_last_minibatch_is_smaller_and_the_loader_has_no_length(
    against_threads: AgainstThreads, schedule: str, channel: str
) -> None:
    against_threads(2, tasks.train, schedule, tasks.ragged_batches(), unsized=True, channel=channel)


@pytest.mark.parametrize(("schedule", "channel"), SOME)
def test_evaluation_within_training(against_threads: AgainstThreads, schedule: str, channel: str) -> None:
    data = tasks.batches(20 if schedule == "1f1b" else 12)
    against_threads(2, tasks.train_and_evaluate, schedule, data, channel=channel)


@pytest.mark.parametrize(("schedule", "channel"), SOME)
def test_leaving_the_loop_and_training_again(
    against_threads: AgainstThreads, schedule: str, channel: str
) -> None:
    data, more = tasks.batches(16), tasks.batches(6, first=50)
    against_threads(2, tasks.leave_and_train_again, schedule, data, more, channel=channel)


def evaluate_and_leave(channel: str, slow: int) -> tuple[float, int]:
    """The last thing that either does; one rank comes late to every message."""
    with tasks.make_pipeline("1f1b", channel=channel) as pipe:
        if pipe.rank == slow:
            wait_first(pipe.handler)
        return pipe.evaluate(tasks.batches(2)), 0


def predict_and_leave(channel: str, slow: int) -> tuple[float, int]:
    with tasks.make_pipeline("1f1b", channel=channel) as pipe:
        if pipe.rank == slow:
            wait_first(pipe.handler)
        outputs = [output for output in pipe.predict(tasks.batches(2)) if output is not None]
        return float(sum(output["loss"] for output in outputs)), len(outputs)


def wait_first(handler: CommunicationHandler) -> None:
    for name in ("recv", "collect"):
        take = getattr(handler, name)

        def late(*args: Any, take: Callable[..., Any] = take, **options: Any) -> Any:
            time.sleep(0.3)
            return take(*args, **options)

        setattr(handler, name, late)


@pytest.mark.parametrize("channel", ["gloo", "shared_memory"])
@pytest.mark.parametrize("slow", [0, 1])
def test_a_rank_that_leaves_first_takes_nothing_with_it(pool: Pool, channel: str, slow: int) -> None:
    (loss, _), (same, _) = pool.run(2, evaluate_and_leave, channel, slow)
    assert loss == same
    (total, outputs), (nothing, none) = pool.run(2, predict_and_leave, channel, slow)
    assert (outputs, nothing, none) == (2, 0.0, 0)
    assert total == pytest.approx(2 * loss, rel=1e-5)


def reduce_small_tensors(channel: str) -> list[list[float]]:
    """Also of fewer elements than ranks: some parts are empty."""
    world = ProcessWorld(channel, timeout=600.0)
    handler = CommunicationHandler(world)
    handler.register_tensor("gradients")
    handler.open([], [(0, 1, 2)])
    begun = [
        handler.all_reduce("gradients", size, torch.full((size,), 10.0**world.rank), (0, 1, 2))
        for size in (1, 2, 5)
    ]
    found = [reduction.finish().tolist() for reduction in begun]
    world.all_gather("done", None)
    handler.close()
    return found


@pytest.mark.parametrize("channel", ["gloo", "shared_memory"])
def test_sums_of_small_tensors(pool: Pool, channel: str) -> None:
    assert pool.run(3, reduce_small_tensors, channel) == [[[111.0] * size for size in (1, 2, 5)]] * 3
