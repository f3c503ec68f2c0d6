"""Trainings of a small BERT with dropout, described by plain arguments.

The workers of the pool run them as ranks; with a `world` they run as threads of one process.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tests import models
from vpipe import Pipeline
from vpipe.communication import World

Batch: TypeAlias = dict[str, Tensor]
State: TypeAlias = dict[str, Tensor] | None
SYNCHRONOUS = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")


@cache
def bert() -> models.Example:
    """One model object for a process; it is never changed."""
    return models.bert(layers=3, dropout=0.1)


def adamw(parameters: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-3, weight_decay=0.1)


def batches(count: int, first: int = 0) -> list[Batch]:
    return [models.language_batch(seed=first + number) for number in range(count)]


def ragged_batches() -> list[Batch]:
    """Minibatches of several lengths; the last one has fewer samples."""
    data = [models.language_batch(4, length, seed) for seed, length in enumerate((8, 5, 12, 8, 6, 9))]
    return [*data, models.language_batch(3, 7, 99)]


def make_pipeline(schedule: str, world: World | None = None, **options: Any) -> Pipeline:
    model, batch, _ = bert()
    if schedule in SYNCHRONOUS:
        options.setdefault("minibatches", 4)
    return Pipeline(model, batch, optimizer=adamw, schedule=schedule, world=world, **options)


def generated(data: Iterable[Batch]) -> Iterator[Batch]:
    """A loader that does not know its length."""
    yield from data


def train(
    schedule: str, data: list[Batch], *, unsized: bool = False, world: World | None = None, **options: Any
) -> tuple[list[tuple[int, float]], State]:
    """(update, loss) of every update, and the whole model's state on rank 0."""
    with make_pipeline(schedule, world, **options) as pipe:
        losses = list(pipe.train(generated(data) if unsized else data))
        return losses, pipe.full_state_dict()


def train_and_evaluate(
    schedule: str, data: list[Batch], *, world: World | None = None, **options: Any
) -> tuple[list[tuple[int, float]], State]:
    """Evaluations stand among the losses as (-1, loss): before, twice within and after the training."""
    held_out = ragged_batches()
    with make_pipeline(schedule, world, **options) as pipe:
        seen = [(-1, pipe.evaluate(held_out))]
        for update, loss in pipe.train(data):
            seen.append((update, loss))
            if update in (1, 3):
                seen.append((-1, pipe.evaluate(held_out)))
        seen.append((-1, pipe.evaluate(held_out)))
        return seen, pipe.full_state_dict()


def leave_and_train_again(
    schedule: str, data: list[Batch], more: list[Batch], *, world: World | None = None, **options: Any
) -> tuple[list[tuple[int, float]], State]:
    """Leave the loop after its third update, then train on other data."""
    with make_pipeline(schedule, world, **options) as pipe:
        seen = []
        for update, loss in pipe.train(data):
            seen.append((update, loss))
            if update == 2:
                break
        seen += pipe.train(more)
        return seen, pipe.full_state_dict()
