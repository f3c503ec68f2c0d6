"""Loss curves of runs, trained in one process: ranks are threads that compute in turn on one device.

The runtime, the schedule and so the delays of every stage's gradients are those of the real pipeline, for any number of
stages. Only the speed is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import tee
from pathlib import Path
from typing import TYPE_CHECKING

from vpipe.communication import InProcessWorld
from vpipe.config.arguments import build_schedule, pipeline_arguments
from vpipe.config.compress import compression_by_ranks
from vpipe.data import Batches, Sampler
from vpipe.errors import ConfigError, NonFiniteError
from vpipe.observe.drift import DriftMeter
from vpipe.observe.loss_curves import final_loss, reached
from vpipe.pipeline import Pipeline
from vpipe.pipeline.layout import Layout
from vpipe.pipeline.threads import run_ranks
from vpipe.record.status import StageDrift
from vpipe.schedule.facts import holdings, mean_delay, sample
from vpipe.train.datasets import Datasets, make_datasets
from vpipe.train.position import Position
from vpipe.train.workload import configured_loss, configured_loss_weight, configured_model
from vpipe.weights import learning_rate_policy

if TYPE_CHECKING:
    from vpipe.config import RunConfig

TIMEOUT = 3600.0
"""Seconds that a rank waits for another: all compute in turn."""
OnUpdate = Callable[[int, int, float], object]
"""Called with the updates made, those of the whole run, and the last one's loss."""


@dataclass(frozen=True)
class LossCurve:
    """The losses of one run."""

    losses: tuple[float, ...]
    """Of each update."""
    samples: int
    """Of each update."""
    epochs: float
    """Passes over the data that the run made."""
    evaluation_loss: float
    partition: tuple[int, ...]
    staleness: tuple[int, ...]
    """Of each stage: how many updates old its gradients are at most."""
    delay: float
    """The same on average over stages and minibatches."""
    overshoot: float | None = None
    """Of the stage with the oldest gradients: what `vpipe diagnose` looks at (`vpipe.observe.drift`)."""
    diverged: str = ""
    """Why the run was not trained to its end, if it was not: the losses from there on are infinite."""

    @property
    def final(self) -> float:
        return final_loss(self.losses)

    def samples_to(self, loss: float) -> int | None:
        """How many samples it took until the mean loss was this low; None: it never was."""
        place = reached(self.losses, loss) if math.isfinite(loss) else None
        return None if place is None else (place + 1) * self.samples

    def slowdown(self, other: LossCurve) -> float | None:
        """How many times as many samples as the other it needs, to the higher of their losses at the end."""
        goal = max(self.final, other.final)
        own, others = self.samples_to(goal), other.samples_to(goal)
        return None if own is None or others is None else own / others


def train_curve(
    config: RunConfig, device: str | None = None, on_update: OnUpdate = lambda made, of, loss: None
) -> LossCurve:
    """Train the configured run with its ranks as threads, on the CPU or on one GPU, and evaluate it at the end.

    Losses equal those of `vpipe train` with the same configuration and no evaluation on the way. A run that diverges
    has a curve too: of several rates the largest often does.
    """
    schedule = build_schedule(config)
    model = configured_model(config, "meta")
    data = make_datasets(config, model, Path(config.log_directory) / "cache")
    position = Position(config, data.train, schedule.update_interval)
    if position.updates < 1:
        raise ConfigError(f"{config.source}: there is no update to make: raise epochs or max_updates")
    first = data.train.batch(range(min(config.batch_size, len(data.train))), 0)
    # Each batch is made once for all ranks. They read in turn: see `InProcessWorld.exclusive`.
    batches = tee(position.batches(0), schedule.num_ranks)
    validation = [list(_validation(config, data))] * schedule.num_ranks
    losses: list[float] = []
    layouts: list[Layout] = []

    def work(world: InProcessWorld) -> tuple[float, tuple[StageDrift, ...]]:
        with Pipeline(
            model,
            first,
            loss_fn=configured_loss(config),
            lr_scheduler=learning_rate_policy(
                config.learning_rate_policy, warmup=config.warmup_updates, total=position.updates
            ),
            precision=config.precision,
            on_nonfinite=config.on_nonfinite,
            loss_weight=configured_loss_weight(config),
            compress=compression_by_ranks(config),
            device=device,
            world=world,
            **pipeline_arguments(config),
        ) as pipe:
            meter = DriftMeter(pipe)
            layouts.append(pipe.layout)
            for _, loss in pipe.train(batches[world.rank]):
                if world.rank == 0:
                    losses.append(loss)
                    on_update(len(losses), position.updates, loss)
            return pipe.evaluate(validation[world.rank]), meter.figures()

    try:
        ranks = run_ranks(schedule.num_ranks, work, TIMEOUT)
        evaluated, diverged = ranks[0][0], ""
    except NonFiniteError as error:
        ranks, evaluated, diverged = [], math.inf, str(error)
        losses += [math.inf] * (position.updates - len(losses))
    drifts = [drift for _, own in ranks for drift in own]
    return LossCurve(
        tuple(losses),
        schedule.update_interval * config.batch_size,
        position.minibatches / position.sampler.minibatches_per_epoch,
        evaluated,
        tuple(layouts[0].partition),
        tuple(held.staleness for held in holdings(sample(schedule))),
        mean_delay(schedule),
        max(drifts, key=lambda drift: drift.delay).overshoot if drifts else None,
        diverged,
    )


def _validation(config: RunConfig, data: Datasets) -> Batches:
    samples = len(data.validation)
    sampler = Sampler(samples, config.batch_size, config.seed)
    return Batches(
        data.validation, sampler, 0, -(-min(samples, config.evaluation_samples) // config.batch_size)
    )
