"""The drift between weight versions, compared with whole copies of weights and gradients that a hook keeps."""

from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import models
from vpipe.communication import InProcessWorld
from vpipe.cost import sample_factor
from vpipe.observe.drift import DriftMeter
from vpipe.pipeline import Pipeline
from vpipe.pipeline.threads import run_ranks
from vpipe.record.status import StageDrift
from vpipe.weights import optimizer_factory

MODEL, BATCH, LOSS = models.sequential(6)
UPDATES = 16


def cosine(one: Tensor, other: Tensor) -> float:
    return float(one @ other / (one.norm() * other.norm()))


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().flatten().float() for tensor in tensors])


def watched(world: InProcessWorld, schedule: str) -> tuple[tuple[StageDrift, ...], dict[str, list[float]]]:
    """What the meter says on this rank, and what all updates say that it looks at: every fourth one, from 0."""
    weights: list[Tensor] = []  # of each update, before it
    gradients: list[Tensor] = []
    read: list[Tensor] = []  # the weights that each gradient is of

    def around(work: Any) -> Any:
        optimizer = work.stage.optimizer
        if work.action.op.value == "B":
            return lambda: read.append(flat(optimizer.current.tensors))
        weights.append(flat(optimizer.master_parameters))
        gradients.append(flat(parameter.grad for parameter in optimizer.model_parameters))
        return None

    minibatches = [tuple(field.roll(number, 0) for field in BATCH) for number in range(UPDATES)]
    options: dict[str, Any] = {} if schedule == "vpipe" else {"minibatches": 1}
    with Pipeline(
        MODEL,
        BATCH,
        loss_fn=LOSS,
        optimizer=optimizer_factory("adamw", 0.01),
        schedule=schedule,
        world=world,
        **options,
    ) as pipe:
        meter = DriftMeter(pipe)
        pipe.on_action(around, ("B", "STEP"))
        for _ in pipe.train(minibatches):
            pass
        weights.append(flat(next(iter(pipe.runtime.stages.values())).optimizer.master_parameters))
        found: dict[str, list[float]] = {"drift": [], "unseen": [], "seen": []}
        delay = world.size - 1 - world.rank
        for update in range(0, UPDATES, 4):
            moved = weights[update] - weights[update + 1]
            now = weights[update]
            found["drift"].append(float((read[update] - now).norm() / now.norm()))
            for name, place in (("unseen", update + 1), ("seen", update + 1 + delay)):
                if place < UPDATES:
                    found[name].append(cosine(gradients[place], moved))
        return meter.figures(), found


@pytest.mark.parametrize("schedule", ["vpipe", "1f1b"])
def test_figures_are_those_of_whole_weights(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vpipe.observe.drift.EVERY", 4)
    results = run_ranks(3, lambda world: watched(world, schedule))
    for rank, (figures, expected) in enumerate(results):
        if schedule == "1f1b" or rank == 2:  # nothing is stale there
            assert figures == ()
            continue
        (stage,) = figures
        assert (stage.stage, stage.delay, stage.optimizer, stage.predicted) == (
            rank,
            2 - rank,
            "adamw",
            False,
        )
        assert stage.samples == len(expected["seen"])
        assert stage.factor == sample_factor(1.0, "adamw")
        for name, values in expected.items():
            assert getattr(stage, name) == pytest.approx(fmean(values), abs=1e-5), name
