"""Training both ways, by a pipeline whose ranks are threads and by the unpartitioned model, and comparing the two."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import models
from tests.examples import varied
from vpipe import Pipeline
from vpipe.graph import ModelGraph
from vpipe.pipeline.threads import run_ranks
from vpipe.verify import comparison, reference

UPDATES = 4
"""As equality is to the last digits, what is wrong shows at the first update, and what is stale at the second."""
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
