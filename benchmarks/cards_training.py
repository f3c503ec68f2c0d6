"""Trainings of `cards.py`: every schedule against the plain model, and a transformer's share of the limit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
import work
from torch import Tensor, nn

from vpipe import Pipeline
from vpipe.communication import ProcessWorld
from vpipe.observe.figures import Meter, RankFigures, shares
from vpipe.pipeline.layout import Layout
from vpipe.verify.comparison import compare_losses, largest_difference
from vpipe.verify.reference import Recipe, Trained, train_asynchronously, train_synchronously, versions_read

BOUND = 1e-9
"""Largest relative difference in float64 that rounding explains."""
SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {},
    "1f1b": {},
    "interleaved": {"chunks": 2},
    "zb-h1": {},
    "zb-v": {},
    "pipedream": {},
    "2bw": {"update_interval": 2},
}
QUICK = ("1f1b", "pipedream")
ASYNCHRONOUS = ("pipedream", "2bw")
UPDATES = 4
TIMED, WARM = 12, 4
"""Updates of the transformer."""
TIMEOUT = 120.0
Say = Callable[[str], None]


def check_schedules(
    world: ProcessWorld, device: torch.device, choice: str, quick: bool, say: Say
) -> list[dict[str, Any]]:
    """A row for each schedule over these channels, and for replicas, whose gradients are added up."""
    cases = [case for case in SCHEDULES.items() if not quick or case[0] in QUICK]
    cases.append(("1f1b", {"replicas": [world.size]}))
    if world.size > 2:
        cases.append(("1f1b", {"replicas": [2] + [1] * (world.size - 2)}))
    rows = []
    for schedule, options in cases:
        say(f"{schedule} {options or ''} over {choice}")
        row = check(world, device, choice, schedule, options)
        if row is not None:
            rows.append(row)
    return rows


def check(
    world: ProcessWorld, device: torch.device, choice: str, schedule: str, options: dict[str, Any]
) -> dict[str, Any] | None:
    """On rank 0 the largest differences of losses and weights."""
    torch.manual_seed(0)
    model = small_model(2 * world.size)
    data = [(torch.randn(4, 32).double(), torch.randn(4, 32).double()) for _ in range(64)]
    recipe = Recipe(sgd, nn.functional.mse_loss)
    if schedule not in ASYNCHRONOUS:
        options = {"minibatches": 2 * world.size, **options}
    with Pipeline(
        model,
        data[0],
        loss_fn=recipe.loss_fn,
        optimizer=recipe.optimizer,
        schedule=schedule,
        channel=choice,
        device=device,
        timeout=TIMEOUT,
        **options,
    ) as pipe:
        interval = pipe.schedule.update_interval
        batches = [data[n % len(data)] for n in range((UPDATES + pipe.schedule.lag) * interval)]
        losses = [loss for _, loss in pipe.train(batches)]
        weights, layout = pipe.full_state_dict(), pipe.layout
        names = sorted(set(pipe.handler.channel_names.values()))
    by_rank = world.all_gather("losses", losses)
    if weights is None:
        return None
    there = [(given.to(device), wanted.to(device)) for given, wanted in batches]
    expected = train_plainly(copy.deepcopy(model).to(device), there, layout, recipe)
    off = compare_losses(by_rank, expected.losses).largest
    far, _ = largest_difference(
        {name: tensor.cpu() for name, tensor in weights.items()},
        {name: tensor.cpu() for name, tensor in expected.weights.items()},
    )
    return {
        "schedule": schedule,
        "options": " ".join(f"{name}={value}" for name, value in options.items()),
        "channels": ", ".join(names),
        "loss": off,
        "weights": far,
        "equal": "yes" if max(off, far) <= BOUND else "NO",
    }


def train_plainly(model: nn.Module, batches: list[Any], layout: Layout, recipe: Recipe) -> Trained:
    schedule = layout.schedule
    plain = (model, batches, schedule.update_interval, recipe, layout.graph)
    if schedule.synchronous:
        return train_synchronously(*plain)
    versions = versions_read(schedule, len(batches))
    return train_asynchronously(*plain, stages=layout.stage_graphs, versions=versions, lag=schedule.lag)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(32, 32), nn.Dropout(0.1)

    def forward(self, given: Tensor) -> Tensor:
        return given + self.dropout(torch.tanh(self.linear(given)))


def small_model(layers: int) -> nn.Module:
    return nn.Sequential(*(Residual() for _ in range(layers))).double()


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.05, momentum=0.9)


def measure_shares(
    world: ProcessWorld, device: torch.device, choice: str, quick: bool, say: Say
) -> list[dict[str, Any]]:
    on_gpu = device.type == "cuda"
    work.LAYERS, work.MINIBATCH = 4 * world.size, 8
    work.WIDTH, work.HEADS, work.SEQUENCE = (
        (64, 2, 32) if quick else (1024, 16, 512) if on_gpu else (384, 6, 128)
    )
    rows = []
    for schedule in QUICK if quick else ("1f1b", "zb-h1", "pipedream"):
        say(f"{schedule} over {choice}, a transformer of {work.LAYERS} layers")
        rows.append(measure_share(world, device, choice, schedule))
    return rows


def measure_share(world: ProcessWorld, device: torch.device, choice: str, schedule: str) -> dict[str, Any]:
    model, data = work.build_model(), work.batches(4 * world.size)
    options = {} if schedule in ASYNCHRONOUS else {"minibatches": len(data)}
    with Pipeline(
        model,
        data[0],
        optimizer=work.build_optimizer,
        schedule=schedule,
        precision="bf16" if device.type == "cuda" else "fp32",
        channel=choice,
        device=device,
        timeout=TIMEOUT,
        **options,
    ) as pipe:
        interval = pipe.schedule.update_interval
        warm = WARM * (len(data) // interval) - 1
        meter, started = Meter(pipe), 0.0
        batches = (data[n % len(data)] for n in range((WARM + TIMED) * len(data)))
        for update, _ in pipe.train(batches):
            if update == warm:
                meter.start()
                started = perf_counter()
        seconds = perf_counter() - started
        figures = meter.total()
        names = sorted(set(pipe.handler.channel_names.values()))
    ranks = [RankFigures(*found) for found in world.all_gather("figures", list(figures))]
    found = shares(ranks)
    return {
        "schedule": schedule,
        "channels": ", ".join(names),
        "samples/s": TIMED * len(data) * work.MINIBATCH / seconds,
        **{name: value for name, value in found.items() if isinstance(value, float)},
        "peak GiB": max(rank.peak_memory for rank in ranks) / 2**30,
    }
