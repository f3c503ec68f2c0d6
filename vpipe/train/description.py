"""The description of a run at its beginning: files in its folder, and a line for the log."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from vpipe.config.file import resolved_yaml
from vpipe.cost import StaleTraining, write_plan
from vpipe.observe.description import plan_of, write_stages
from vpipe.record.run_folder import STAGES
from vpipe.schedule import Schedule
from vpipe.schedule.facts import holdings, sample
from vpipe.system.environment import DEVICE
from vpipe.system.files import exists, write_text
from vpipe.train.datasets import TOKENIZER

if TYPE_CHECKING:
    from torch import nn

    from vpipe.config import RunConfig
    from vpipe.pipeline import Pipeline
    from vpipe.system.best_effort import BestEffort
    from vpipe.train.datasets import Datasets
    from vpipe.train.position import Position


def write_description(
    pipe: Pipeline, config: RunConfig, data: Datasets, folder: Path, effort: BestEffort
) -> None:
    """Write the resolved configuration, the stages, the tokenizer and the plan; rank 0 only."""
    with effort.writing(folder / "config.yml"):
        write_text(folder / "config.yml", resolved_yaml(config))
    with effort.writing(folder / STAGES):
        write_stages(pipe.layout, folder, cap=config.gpu_memory)
    if data.tokenizer is not None:
        with effort.writing(folder / TOKENIZER):
            write_text(folder / TOKENIZER, data.tokenizer.to_str())
    plan = folder / "plan.json"
    if not exists(plan):  # with `partition: auto` the launcher has written it
        made = plan_of(pipe, replicas=config.replicas, chunks=config.chunks, batch_size=config.batch_size)
        with effort.writing(plan):
            write_plan(made, plan)


def about_staleness(config: RunConfig, schedule: Schedule) -> str | None:
    """A line about the optimizer and the remedies of a run whose gradients are old."""
    oldest = max(held.staleness for held in holdings(sample(schedule)))
    if schedule.synchronous or not oldest:
        return None
    optimizer, predict = config.chosen_optimizer, config.remedies.predict
    warning = StaleTraining(optimizer, predict).warning(schedule)
    if config.optimizer is not None:
        return None if warning is None else f"WARNING: {warning}"
    with_it = " with predicted weights" if predict else ""
    return (
        f"gradients are up to {oldest} updates old: optimizer {optimizer}{with_it} is used, which bears it best; "
        "the keys optimizer and staleness choose another (docs/convergence.md)"
    ) + ("" if warning is None else f"; WARNING: {warning}")


def about_architecture(config: RunConfig, model: nn.Module) -> str | None:
    """A line about a model of another class than its `config.json` names."""
    named = getattr(getattr(model, "config", None), "architectures", None)
    built = type(model).__name__
    if config.model is None or "model" in config.code or not named or built in named:
        return None
    return (
        f"{config.model} names {', '.join(named)}, which is no class of transformers that takes labels: {built} is "
        "trained instead"
    )


def describe(pipe: Pipeline, config: RunConfig, model: str, position: Position) -> str:
    """The run in one line. Call it on every rank: ranks exchange their devices."""
    devices = pipe.world.all_gather("devices", str(pipe.device))
    where = f"CPU ranks ({_why_no_gpu(config)})"
    if pipe.device.type == "cuda":
        channels = sorted(set(pipe.handler.channel_names.values()))
        where = f"ranks on {', '.join(devices)}, joined by {', '.join(channels)}"
    modes = [str(mode) for mode in pipe.handler.compressions()]
    how = "compiled, " if config.compile else ""
    graphs = {True: "with CUDA graphs, ", "auto": "with CUDA graphs where they gain, "}
    how += graphs.get(config.cuda_graphs, "") if pipe.device.type == "cuda" else ""
    if config.compress != "none":
        found = sorted({mode for rank in pipe.world.all_gather("compressions", modes) for mode in rank})
        how += (
            f"compressed by {' or '.join(found)}, "
            if found
            else "uncompressed (no rank is on another host), "
        )
    return (
        f"{model}: {len(pipe.layout.graph.blocks)} blocks as {list(pipe.layout.partition)} on "
        f"{pipe.world.size} {where}, {how}schedule {pipe.schedule.name}, "
        f"{position.updates} updates of {position.interval} x {config.batch_size} samples"
    )


def _why_no_gpu(config: RunConfig) -> str:
    """The reason, and what becomes of the keys that are about GPUs."""
    reason = f"{DEVICE} is {os.environ[DEVICE]!r}" if DEVICE in os.environ else "there is no GPU here"
    reason += ": those of `machines` are not used" if config.machines else ""
    return f"{reason}; gpu_memory only limits plans" if config.gpu_memory else reason
