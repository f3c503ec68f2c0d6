"""Ranks that are processes train as ranks that are threads do: every schedule, every channel."""

import pytest

from tests.multiprocess import tasks
from tests.multiprocess.against_threads import CHANNELS, AgainstThreads

SCHEDULES = (*tasks.SYNCHRONOUS, "pipedream", "2bw")
SOME = [("1f1b", "gloo"), ("2bw", "gloo"), ("pipedream", "gloo"), ("pipedream", "shared_memory")]

pytestmark = pytest.mark.timeout(90)


@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_over_every_channel(
    against_threads: AgainstThreads, schedule: str, channel: str
) -> None:
    against_threads(2, tasks.train, schedule, tasks.batches(12), channel=channel)


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
@pytest.mark.parametrize(
    ("replicas", "channel"), [((2, 2), "shared_memory"), ((2, 1), "gloo"), ((2, 1), "shared_memory")], ids=str
)
def test_replicas(
    against_threads: AgainstThreads, schedule: str, replicas: tuple[int, ...], channel: str
) -> None:
    against_threads(
        sum(replicas), tasks.train, schedule, tasks.batches(12), replicas=replicas, channel=channel
    )


@pytest.mark.parametrize(("schedule", "channel"), [*SOME, ("zb-v", "gloo")])
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
