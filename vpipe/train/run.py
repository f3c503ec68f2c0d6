"""The start of a run: this process becomes its launcher or one of its ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vpipe.errors import ConfigError, printable
from vpipe.launch.idle import is_idle, telling_idle_ranks, wait_as_idle
from vpipe.launch.meeting import forget_meeting
from vpipe.launch.place import enter_place
from vpipe.launch.rank import LAUNCHER, TORCHRUN, end_with_launcher
from vpipe.launch.sbatch import Resources, sbatch_script, submit
from vpipe.launch.slurm import join_step, this_step
from vpipe.system.start import process_began
from vpipe.train.checks import check_choosable, check_paths, stages_of_ranks
from vpipe.train.launcher import launch

if TYPE_CHECKING:
    from vpipe.config import RunConfig


def run(
    config: RunConfig, arguments: Sequence[str], work: Callable[[], None], *, max_restarts: int = 0
) -> None:
    """Do `work` on every rank of the run; `arguments` are those of the same `vpipe` command for a rank.

    A process that torchrun, srun or the launcher has started is a rank and works; any other starts the ranks.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        step = this_step()
        if step is None or step.size == 1 != config.ranks:
            launch(config, arguments, max_restarts=max_restarts, began=process_began())
            return
        _check_started_by_others(config, max_restarts)
        join_step(step, config, arguments, Path(config.log_directory))
    elif LAUNCHER not in os.environ:
        _check_started_by_others(config, max_restarts)
    if LAUNCHER in os.environ or TORCHRUN in os.environ:
        end_with_launcher()
    try:
        enter_place(config, arguments)
        if is_idle(config):
            wait_as_idle(config)
        else:
            with telling_idle_ranks():
                work()
    finally:
        forget_meeting()


def submit_run(
    config: RunConfig, arguments: Sequence[str], resources: Resources, *, max_restarts: int, dry_run: bool
) -> None:
    """Let SLURM start the ranks of a run; `dry_run` only prints the script."""
    check_choosable(config)
    stages_of_ranks(config)
    check_paths(config)
    if config.python is not None:
        raise ConfigError(
            f"{config.source}: python is {config.python!r}, which is for ranks that `vpipe train` starts by ssh: leave "
            "it out; srun starts the Python that runs this command"
        )
    script = sbatch_script(config, arguments, resources, max_restarts)
    if dry_run:
        print(script, end="")
        return
    job = submit(script)
    print(
        printable(
            f"submitted job {job}: its output is in slurm-{job}.out, its logs and figures in {config.log_directory}"
        )
    )


def _check_started_by_others(config: RunConfig, max_restarts: int) -> None:
    """Raise for what only our own launcher could do, where torchrun, srun or another has started the ranks."""
    by_srun = TORCHRUN not in os.environ and this_step() is not None
    other = "srun" if by_srun else "torchrun" if TORCHRUN in os.environ else "another launcher"
    if max_restarts:
        restart = (
            "submit the job with `vpipe train --slurm --max-restarts`" if by_srun else "give it to torchrun"
        )
        raise ConfigError(
            f"--max-restarts is {max_restarts}: a rank that {other} has started cannot start the others again: "
            f"{restart}, or leave it out"
        )
    if config.python is not None:
        raise ConfigError(
            f"{config.source}: python is {config.python!r}, which is for ranks that `vpipe train` starts by ssh, and "
            f"{other} has started this one: leave it out, and let {other} start that Python"
        )
    port = os.environ.get("MASTER_PORT", "")
    if config.port and not by_srun and port != str(config.port):
        has_set = "torchrun has set MASTER_PORT to" if other == "torchrun" else "MASTER_PORT is"
        fix = "give torchrun --master-port" if other == "torchrun" else "make them equal"
        raise ConfigError(
            f"{config.source}: port is {config.port}, but {has_set} {port!r}: {fix}, or leave port out"
        )
