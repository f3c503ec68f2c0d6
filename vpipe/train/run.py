"""The start of a run: this process becomes its launcher or one of its ranks."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vpipe.config.arguments import build_schedule, check_blocks
from vpipe.config.code import code_directories
from vpipe.config.file import AUTO
from vpipe.errors import ConfigError, RankFailedError, Stopped, VPipeError
from vpipe.launch.local import Ranks, run_ranks_here
from vpipe.launch.mps import gpus_of
from vpipe.launch.rank import LAUNCHED, TORCHRUN, end_with_launcher
from vpipe.launch.watch import FailureLog
from vpipe.observe.results import write_interrupted_results
from vpipe.observe.trackers import check_trackers
from vpipe.record.run_folder import FAILED, STOPPED, make_run_folder
from vpipe.system.console import announce
from vpipe.system.faults import VARIABLE, read_faults
from vpipe.system.files import exists, is_folder
from vpipe.system.host_memory import total_memory
from vpipe.system.start import Phases, process_began
from vpipe.system.units import show_bytes

if TYPE_CHECKING:
    from vpipe.config import RunConfig

LEAST_MEMORY = 100 << 20
"""Bytes of its own that a process has when it has imported torch."""


def run(
    config: RunConfig, arguments: Sequence[str], work: Callable[[], None], *, max_restarts: int = 0
) -> None:
    """Do `work` on every rank of the run; `arguments` are those of the same `vpipe` command for a rank.

    A process that torchrun or the launcher has started is a rank and works; any other starts the ranks.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        launch(config, arguments, max_restarts=max_restarts, began=process_began())
        return
    if LAUNCHED in os.environ or TORCHRUN in os.environ:
        end_with_launcher()
    work()


def launch(
    config: RunConfig,
    arguments: Sequence[str],
    *,
    quiet: bool = False,
    max_restarts: int = 0,
    began: float | None = None,
) -> Path:
    """Start the ranks of a run and wait for them to end; its folder, where its logs and figures are.

    `began` is when the command did, by the monotonic clock; default: now.
    """
    phases = Phases("launch", began)
    read_faults(os.environ.get(VARIABLE, ""))
    _check_hosts(config)
    _check_memory(config)
    stages = _stages_of_ranks(config)
    _check_paths(config)
    if config.container is None:  # else it is the image that must have them
        check_trackers(config.source, {"wandb": config.wandb, "mlflow": config.mlflow})
    directory = None if config.directory is None else config.path(config.directory)
    if directory is not None and not is_folder(directory):
        raise ConfigError(f"{config.source}: directory is {config.directory!r}: there is no such directory")
    folder = make_run_folder((directory or Path()) / config.log_directory)
    counted = "1 rank" if config.ranks == 1 else f"{config.ranks} ranks"
    announce(f"{config.source}: starting {counted}, with logs and figures in {folder}")
    if config.partition == AUTO:
        from vpipe.train.planning import write_run_plan

        plan = folder.absolute() / "plan.json"
        write_run_plan(config, plan, phases)
        phases.begin("launch")
        arguments = [*arguments, "--set", f"partition={plan}"]
    if config.code:  # the ranks may start in another directory
        arguments = [
            *arguments,
            "--set",
            f"python_path={json.dumps(list(map(str, code_directories(config))))}",
        ]
    ranks = Ranks(
        arguments,
        config.ranks,
        folder,
        stages,
        port=config.port,
        directory=directory,
        interpreter=_interpreter(config),
        quiet=quiet,
        heartbeat_limit=config.heartbeat_limit,
        patience=config.timeout,
        gpus=gpus_of(config),
        phases=phases,
    )
    try:
        _run(ranks, max_restarts)
    except VPipeError as error:
        write_interrupted_results(folder, FAILED, str(error).partition("\n")[0])
        raise
    except SystemExit as ended:
        if ended.code != Stopped.exit_code:
            print("the run was stopped by you, at once and without a checkpoint", file=sys.stderr, flush=True)
            write_interrupted_results(folder, STOPPED, "it ended at once, without a checkpoint")
        raise
    return folder


def _run(ranks: Ranks, max_restarts: int) -> None:
    log = FailureLog(ranks.folder)
    for attempt in range(max_restarts + 1):
        try:
            run_ranks_here(ranks, attempt, log)
            return
        except RankFailedError as error:
            if attempt == max_restarts:
                if max_restarts:
                    raise RankFailedError(
                        *f"gave up after {max_restarts} restarts: {error}".split("\n", 1)
                    ) from None
                raise
            print(
                f"{error}\nrestart {attempt + 1} of {max_restarts}, from the newest good checkpoint of {ranks.folder}",
                file=sys.stderr,
                flush=True,
            )


def _stages_of_ranks(config: RunConfig) -> list[str]:
    """The stages of each rank in words, for messages; raises if schedule, partition and model do not fit together."""
    if config.partition == AUTO:
        return ["some stage"] * config.ranks
    schedule = build_schedule(config)
    check_blocks(config, schedule)
    return [" and ".join(f"stage {s}" for s in schedule.stages_of(rank)) for rank in range(config.ranks)]


def _check_memory(config: RunConfig) -> None:
    """Raise for more ranks than can be started here, before they take the memory of everybody else."""
    needed, memory = config.ranks * LEAST_MEMORY, total_memory()
    if needed > memory:
        raise ConfigError(
            f"{config.source}: the run has {config.ranks} ranks, which need {show_bytes(needed)} before they have any "
            f"weights, and this host has {show_bytes(memory)}: give fewer stages or replicas"
        )


def _check_hosts(config: RunConfig) -> None:
    """Raise if `machines` names another host: there ranks are started by torchrun."""
    here = {"localhost", "127.0.0.1", "::1", socket.gethostname()}
    for machine in config.machines or ():
        host = machine.rpartition(":")[0]
        if host not in here:
            raise ConfigError(
                f"{config.source}: machines names {machine!r}, which is not this host ({socket.gethostname()}): "
                f"start `torchrun ... -m vpipe train {config.source}` on each host, or name localhost"
            )


def _check_paths(config: RunConfig) -> None:
    """Raise for missing files before any rank starts."""
    for key in ("data_dir", "tokenizer", "pretrained"):
        written = getattr(config, key)
        if written is not None and not exists(config.path(written)):
            raise ConfigError(f"{config.source}: {key} is {written!r}: there is no {config.path(written)}")


def _interpreter(config: RunConfig) -> list[str]:
    """The command that runs `-m vpipe`: this Python, or the one in the container image."""
    if config.container is None:
        return [sys.executable]
    image = config.path(config.container)
    tool = shutil.which("apptainer") or shutil.which("singularity")
    if tool is None:
        raise ConfigError(
            f"{config.source}: container is {config.container!r}: neither apptainer nor singularity is installed "
            "here: install one, or leave the key out"
        )
    if not exists(image):
        raise ConfigError(f"{config.source}: container is {config.container!r}: there is no such image")
    return [tool, "exec", str(image.absolute()), "python3"]
