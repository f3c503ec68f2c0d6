"""The pipeline computes what the unpartitioned model computes: every schedule, to the last digits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import models
from tests.examples import example, varied
from vpipe import Pipeline, comparison, reference
from vpipe.graph import ModelGraph
from vpipe.runtime import count_samples
from vpipe.threads import run_ranks

SYNCHRONOUS = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"]
UPDATES = 20
BOUND = {torch.float64: 1e-9, torch.float32: 1e-5}


def adamw(parameters: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-3, weight_decay=0.1)


class Check:
    """Trains both ways and compares every loss and every parameter."""

    def __init__(self, captured: Callable[..., ModelGraph]) -> None:
        self.captured = captured
        self.references: dict[Any, reference.Trained] = {}

    def __call__(
        self,
        example: models.Example,
        ranks: int,
        *,
        minibatches: int = 4,
        updates: int = UPDATES,
        data: list[Any] | None = None,
        weigh: Callable[[Any], float] = lambda batch: 1.0,
        **options: Any,
    ) -> None:
        model, batch, loss_fn = example
        dtype = next(model.parameters()).dtype
        batches = data or varied(batch, minibatches * updates)

        def train(world: Any) -> tuple[list[float], dict[str, Tensor] | None]:
            with Pipeline(
                model,
                batch,
                optimizer=adamw,
                loss_fn=loss_fn,
                minibatches=minibatches,
                world=world,
                **options,
            ) as pipe:
                losses = [loss for _, loss in pipe.train(batches)]
                return losses, pipe.full_state_dict()

        results = run_ranks(ranks, train)
        key = None if data else (id(model), minibatches, updates, options.get("clip_norm"))
        if key is None or key not in self.references:
            self.references[key] = reference.train_synchronously(
                model,
                batches,
                minibatches,
                reference.Recipe(adamw, loss_fn, clip_norm=options.get("clip_norm"), loss_weight=weigh),
                self.captured(model, batch, loss_fn),
            )
        expected, gradients, weights = self.references[key]
        for losses, _ in results:
            assert losses == pytest.approx(expected, rel=BOUND[dtype])
        state = results[0][1]
        assert state is not None
        compared = weights.keys() - comparison.rounding_alone(gradients)
        difference, where = comparison.largest_difference({n: state[n] for n in compared}, weights)
        assert difference < BOUND[dtype], where


@pytest.fixture(scope="module")
def checker(captured: Callable[..., ModelGraph]) -> Check:
    return Check(captured)


@pytest.fixture
def check_synchronous(checker: Check, capture_once: None) -> Check:
    return checker


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_every_schedule_with_dropout_and_tied_weights(
    check_synchronous: Check, schedule: str, ranks: int
) -> None:
    check_synchronous(example("bert", layers=4, dropout=0.1), ranks, schedule=schedule)


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_float32(check_synchronous: Check, schedule: str) -> None:
    check_synchronous(example("bert", torch.float32, layers=4, dropout=0.1), 2, schedule=schedule)


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_recompute(check_synchronous: Check, schedule: str) -> None:
    check_synchronous(example("gpt2", layers=4, dropout=0.1), 2, schedule=schedule, recompute_ratio=0.5)


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_clipping_by_the_global_norm(check_synchronous: Check, schedule: str) -> None:
    check_synchronous(example("bert", layers=4, dropout=0.1), 2, schedule=schedule, clip_norm=0.05, updates=8)


@pytest.mark.parametrize("replicas", [(2, 1), (1, 2), (3, 2), (2, 2, 1)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_any_numbers_of_replicas(check_synchronous: Check, schedule: str, replicas: tuple[int, ...]) -> None:
    check_synchronous(
        example("bert", layers=4, dropout=0.1),
        sum(replicas),
        schedule=schedule,
        replicas=replicas,
        minibatches=5,
        updates=6,
        clip_norm=0.5,
    )


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_equal_replicas_of_chunked_schedules(check_synchronous: Check, schedule: str) -> None:
    bert = example("bert", layers=4, dropout=0.1)
    check_synchronous(bert, 4, schedule=schedule, replicas=(2, 2), minibatches=5, updates=6)


@pytest.mark.parametrize("name", models.ZOO)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_model(check_synchronous: Check, name: str, ranks: int) -> None:
    check_synchronous(example(name), ranks, schedule="1f1b", updates=3)


@pytest.mark.parametrize("name", ["t5", "unet", "lstm", "untraceable"])
@pytest.mark.parametrize("schedule", ["zb-v", "interleaved"])
def test_long_skips_and_odd_models_in_chunks(check_synchronous: Check, name: str, schedule: str) -> None:
    check_synchronous(example(name), 2, schedule=schedule, updates=3)


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
    model, batch, loss_fn = models.bert()
    for parameter in model.bert.embeddings.parameters():
        parameter.requires_grad_(False)
    for parameter in model.bert.encoder.layer[1].attention.parameters():
        parameter.requires_grad_(False)
    check_synchronous((model.double(), batch, loss_fn), 3, schedule="1f1b", updates=5)


def test_hand_made_partition(check_synchronous: Check) -> None:
    check_synchronous(example("bert", layers=4, dropout=0.1), 2, schedule="1f1b", updates=3, partition=(1, 8))
