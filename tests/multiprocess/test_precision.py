"""Mixed precision between processes: float32 masters, and one loss scale that all ranks change together."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests import models
from tests.multiprocess import tasks
from tests.multiprocess.pool import Pool
from vpipe import Pipeline


class Seen(NamedTuple):
    """What one rank saw of a run."""

    losses: list[float]
    scales: list[float]
    skipped: list[int]
    dtypes: set[tuple[torch.dtype, torch.dtype]]
    unchanged: bool


def _train(name: str, schedule: str, precision: str, count: int, scale: float | None = None) -> Seen:
    model, batch, loss_fn = models.bert(1, 0.1) if name == "bert" else models.sequential(2, 0.1)
    options: dict[str, Any] = {"minibatches": 4} if schedule in tasks.SYNCHRONOUS else {}
    with Pipeline(
        model,
        batch,
        optimizer=tasks.adamw,
        loss_fn=loss_fn,
        schedule=schedule,
        precision=precision,
        **options,
    ) as pipe:
        loss_scale = pipe.runtime.updates.loss_scale
        if scale is not None:
            loss_scale.value = scale
        before = _copied(pipe.state_dict())
        losses, scales = [], []
        for _, loss in pipe.train([batch] * count):
            losses.append(loss)
            scales.append(loss_scale.value)
        scales.append(loss_scale.value)
        optimizers = [stage.optimizer for stage in pipe.runtime.stages.values()]
        after = pipe.state_dict()
        return Seen(
            losses,
            scales,
            list(pipe.runtime.updates.skipped),
            {
                (parameter.dtype, master.dtype)
                for optimizer in optimizers
                for parameter, master in zip(
                    optimizer.model_parameters, optimizer.master_parameters, strict=True
                )
            },
            all(torch.equal(before[name], after[name]) for name in before),
        )


def _copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


def _run(pool: Pool, *args: Any) -> list[Seen]:
    return [Seen(*seen) for seen in pool.run(2, _train, *args)]


@pytest.mark.parametrize(
    ("schedule", "precision", "dtype"),
    [
        ("1f1b", "bf16", torch.bfloat16),
        pytest.param("pipedream", "fp16", torch.float16, marks=pytest.mark.long),
    ],
)
def test_training_falls_with_float32_masters(
    pool: Pool, schedule: str, precision: str, dtype: torch.dtype
) -> None:
    first, second = _run(pool, "bert", schedule, precision, 40 if schedule == "1f1b" else 16)
    assert first.losses == second.losses
    assert all(loss == loss for loss in first.losses)
    assert first.losses[-1] < first.losses[0] - 0.2
    assert first.dtypes == second.dtypes == {(dtype, torch.float32)}
    # The scale that fp16 starts with may be too large at first.
    allowed = 4 if precision == "fp16" else 0
    assert max(len(first.skipped), len(second.skipped)) <= allowed


def test_an_overflow_skips_the_update_on_every_stage(pool: Pool) -> None:
    first, second = _run(pool, "sequential", "1f1b", "fp16", 12, 2.0**40)
    for seen in (first, second):
        assert seen.skipped == [0, 1, 2]
        assert seen.unchanged
        assert seen.scales == [2.0**39, 2.0**38, 2.0**37, 2.0**37]


def test_an_overflow_of_an_asynchronous_run_halves_the_scale_on_every_rank(pool: Pool) -> None:
    first, second = _run(pool, "sequential", "pipedream", "fp16", 6, 2.0**40)
    for seen in (first, second):
        assert seen.skipped == [0, 1, 2, 3, 4, 5]
        assert seen.unchanged
        assert seen.scales[-1] == 2.0**34


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_training_goes_on_when_the_scale_has_come_down(pool: Pool, schedule: str) -> None:
    first, second = _run(pool, "sequential", schedule, "fp16", 64 if schedule == "1f1b" else 24, 2.0**20)
    assert first.losses == second.losses
    assert first.dtypes == second.dtypes == {(torch.float16, torch.float32)}
    assert first.scales[-1] == second.scales[-1]
    assert 2.0**8 <= first.scales[-1] < 2.0**20
    assert first.losses[-1] < first.losses[0] - 0.03
