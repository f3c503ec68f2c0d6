"""The world of a run: its ranks meet, and check that they were started alike and where the configuration says."""

from __future__ import annotations

import os

import torch

from vpipe.communication import ProcessWorld, World, agree
from vpipe.config import RunConfig
from vpipe.errors import ConfigError
from vpipe.launch.meeting import forget_meeting
from vpipe.launch.rank import LAUNCHER
from vpipe.launch.slurm import this_step
from vpipe.observe.trackers import check_trackers
from vpipe.train.same_config import check_hosts, check_same_config


def world_of_run(config: RunConfig, given: World | None = None) -> World:
    """Meet the other ranks, unless a world is given; raises on every rank if they do not fit the configuration."""
    if config.distributed_backend == "nccl" and not torch.cuda.is_available():
        raise ConfigError(
            f"{config.source}: distributed_backend is 'nccl', which carries GPU tensors, and there is no GPU here: "
            "write gloo, or leave it out"
        )
    # A launcher watches the ranks of its own host; it may reach two hosts that do not reach each other.
    together = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    watched = LAUNCHER in os.environ and together
    world = given or ProcessWorld(
        "nccl" if config.distributed_backend == "nccl" else "auto",
        config.timeout,
        nccl=config.distributed_backend != "gloo",
        rendezvous_limit=config.rendezvous_limit,
        heartbeat_limit=None if watched else config.heartbeat_limit,
    )
    forget_meeting()
    if world.size != config.ranks:
        start = (
            f"use torchrun --nproc-per-node {config.ranks}" if together else f"start {config.ranks} in all"
        )
        raise ConfigError(
            f"{config.source} describes {config.ranks} ranks and {world.size} were started: "
            f"{start}, or change machines, stages or replicas"
        )
    check_same_config(world, config)
    if LAUNCHER not in os.environ and this_step() is None:  # `check_machine` looks at tasks of SLURM
        check_hosts(world, config)
    agree(
        world,
        "trackers",
        lambda: check_trackers(config.source, {"wandb": config.wandb, "mlflow": config.mlflow}),
    )
    return world
