"""The pipeline computes what the unpartitioned model computes: every schedule, to the last digits.

Every model of the zoo: `test_graph_transparency.py`.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests import models
from tests.both_ways import UPDATES, Check
from tests.examples import example, varied
from vpipe.runtime import count_samples

SYNCHRONOUS = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"]
MANY_UPDATES = 20


@pytest.mark.parametrize("updates", [UPDATES, pytest.param(MANY_UPDATES, marks=pytest.mark.long)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_every_schedule_with_dropout_and_tied_weights(
    check_synchronous: Check, schedule: str, ranks: int, updates: int
) -> None:
    check_synchronous(example("bert", layers=4, dropout=0.1), ranks, schedule=schedule, updates=updates)


@pytest.mark.parametrize(
    ("name", "updates"),
    [("sequential", UPDATES), pytest.param("bert", MANY_UPDATES, marks=pytest.mark.long)],
)
@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_float32(check_synchronous: Check, schedule: str, name: str, updates: int) -> None:
    model = example(name, torch.float32, layers=4, dropout=0.1)
    check_synchronous(model, 2, schedule=schedule, updates=updates)


@pytest.mark.parametrize(
    ("name", "updates"), [("bert", UPDATES), pytest.param("gpt2", MANY_UPDATES, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_recompute(check_synchronous: Check, schedule: str, name: str, updates: int) -> None:
    model = example(name, layers=4, dropout=0.1)
    check_synchronous(model, 2, schedule=schedule, updates=updates, recompute_ratio=0.5)


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_clipping_by_the_global_norm(check_synchronous: Check, schedule: str) -> None:
    check_synchronous(example("bert", layers=4, dropout=0.1), 2, schedule=schedule, clip_norm=0.05)


@pytest.mark.parametrize("replicas", [(2, 1), (1, 2), (3, 2), (2, 2, 1)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_any_numbers_of_replicas(check_synchronous: Check, schedule: str, replicas: tuple[int, ...]) -> None:
    check_synchronous(
        example("bert", layers=4, dropout=0.1),
        sum(replicas),
        schedule=schedule,
        replicas=replicas,
        minibatches=5,
        updates=3,
        clip_norm=0.5,
    )


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_equal_replicas_of_chunked_schedules(check_synchronous: Check, schedule: str) -> None:
    bert = example("bert", layers=4, dropout=0.1)
    check_synchronous(bert, 4, schedule=schedule, replicas=(2, 2), minibatches=5, updates=3)


def test_fewer_minibatches_than_stages_and_a_short_last_update(check_synchronous: Check) -> None:
    bert = example("bert", layers=4, dropout=0.1)
    data = varied(bert[1], 11)
    check_synchronous(bert, 4, schedule="1f1b", minibatches=3, data=data)


def ragged() -> list[Any]:
    """Minibatches of several lengths, the last with fewer samples."""
    data = [models.language_batch(4, length, seed) for seed, length in enumerate((8, 5, 12, 8, 6, 9, 8))]
    return [*data, models.language_batch(3, 7, 99)]


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_lengths_vary_and_the_last_minibatch_is_smaller(check_synchronous: Check, schedule: str) -> None:
    bert = example("bert", layers=4, dropout=0.1)
    check_synchronous(bert, 2, schedule=schedule, data=ragged(), weigh=count_samples)


def test_minibatches_weigh_what_the_user_says(check_synchronous: Check) -> None:
    def labels(fields: dict[str, Tensor]) -> float:
        return float((fields["labels"] != -100).sum())

    bert = example("bert", layers=4, dropout=0.1)
    check_synchronous(bert, 2, schedule="1f1b", data=ragged(), weigh=labels, loss_weight=labels)


def test_frozen_parameters_stay_and_the_rest_is_trained(check_synchronous: Check) -> None:
    model, batch, loss_fn = models.bert(layers=2)
    for parameter in model.bert.embeddings.parameters():
        parameter.requires_grad_(False)
    for parameter in model.bert.encoder.layer[1].attention.parameters():
        parameter.requires_grad_(False)
    check_synchronous((model.double(), batch, loss_fn), 3, schedule="1f1b")


def test_hand_made_partition(check_synchronous: Check) -> None:
    check_synchronous(example("bert", layers=4, dropout=0.1), 2, schedule="1f1b", updates=3, partition=(1, 8))
