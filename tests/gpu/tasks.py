"""Trainings on a GPU, in float64 unless a precision is asked for: there a mistake cannot pass as rounding.

In float32 the fused attention adds up its gradients in an order of its own each time.
"""

import copy
from functools import cache
from typing import Any

from torch import nn

from tests import models
from tests.multiprocess import tasks
from vpipe import Pipeline
from vpipe.communication import World
from vpipe.stage.host_store import PinnedStore
from vpipe.weights import OptimizerFactory

GPU = "cuda:0"
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "pipedream", "2bw")


@cache
def double_bert() -> models.Example:
    model, batch, loss_fn = tasks.bert()
    return copy.deepcopy(model).double(), batch, loss_fn


@cache
def without_dropout() -> nn.Module:
    model = copy.deepcopy(double_bert()[0])
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def options_of(schedule: str) -> dict[str, Any]:
    own = {"interleaved": {"chunks": 2}, "2bw": {"update_interval": 2}, "pipedream": {}}
    return (
        own.get(schedule, {})
        if schedule in ("2bw", "pipedream")
        else {"minibatches": 4, **own.get(schedule, {})}
    )


def train(
    schedule: str,
    data: list[tasks.Batch],
    *,
    world: World | None = None,
    precision: str | None = None,
    device: str = GPU,
    optimizer: OptimizerFactory = tasks.adamw,
    model: nn.Module | None = None,
    **options: Any,
) -> tuple[list[tuple[int, float]], tasks.State]:
    PinnedStore.least = 1  # the model is small: let all of it be swapped that may be
    usual, batch, _ = double_bert() if precision is None else tasks.bert()
    more: dict[str, Any] = {} if precision is None else {"precision": precision}
    with Pipeline(
        model or usual,
        batch,
        optimizer=optimizer,
        schedule=schedule,
        world=world,
        device=device,
        **options_of(schedule),
        **more,
        **options,
    ) as pipe:
        losses = list(pipe.train(data))
        return losses, pipe.full_state_dict()
