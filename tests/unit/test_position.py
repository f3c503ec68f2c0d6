"""The data position of a run that continues under a schedule whose updates have another number of minibatches."""

from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_save_policy import the_model
from vpipe import data
from vpipe.config.file import check_values
from vpipe.data import Subset
from vpipe.train.models import synthetic_batch
from vpipe.train.position import Position

SAMPLES = 40


def position(interval: int, **keys: Any) -> Position:
    config = check_values({"batch_size": 2, "epochs": 3} | keys, Path("run.yml"))
    drawn = data.Synthetic(
        lambda count, seed: synthetic_batch(the_model().model, count, 8, seed), SAMPLES + 10, 0
    )
    samples: Subset = data.split(drawn, 0.2, 0)[0]
    assert len(samples) == SAMPLES
    return Position(config, samples, interval)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (4, 3), (2, 2)])
def test_max_updates_counts_updates_whatever_they_are_made_of(before: int, after: int) -> None:
    first = position(before, max_updates=6)
    assert first.updates == 6
    assert len(first.batches(0)) == 6 * before
    second = position(after, max_updates=10)
    second.resume(first.state(6), 6, "step-00000006")
    assert second.updates == 10
    assert second.state(6)["minibatch"] == 6 * before  # no sample twice, none missed
    assert len(second.batches(6)) == 4 * after
    assert len(second.batches(6, 7)) == after
    assert second.state(10)["minibatch"] == 6 * before + 4 * after


def test_epochs_end_it_all_the_same() -> None:
    last = SAMPLES // 2 * 3
    first = position(2, max_updates=6)
    second = position(4, max_updates=100)
    second.resume(first.state(6), 6, "step-00000006")
    assert second.updates == 6 + (last - 12) // 4
    assert second.state(second.updates)["minibatch"] == last


def test_what_has_made_more_updates_already_has_nothing_to_train() -> None:
    second = position(1, max_updates=4)
    second.resume(position(2, max_updates=6).state(6), 6, "step-00000006")
    assert second.updates <= 6
