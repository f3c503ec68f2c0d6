"""A run from its configuration to its end: this process is either its launcher or one of its ranks."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vpipe.arguments import build_schedule
from vpipe.config_file import AUTO
from vpipe.errors import ConfigError
from vpipe.launch.local import LAUNCHED, LAUNCHER, run_ranks_here
from vpipe.observe.folder import make_run_folder

if TYPE_CHECKING:
    from vpipe.config import RunConfig


def run(config: RunConfig, arguments: Sequence[str], work: Callable[[], None]) -> None:
    """Do `work` on every rank of the run; `arguments` are those of the same `vpipe` command for a rank.

    A process that torchrun or the launcher has started is a rank and works; any other starts the ranks.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        launch(config, arguments)
        return
    if LAUNCHED in os.environ:
        _end_with_launcher()
    work()


def launch(config: RunConfig, arguments: Sequence[str], *, quiet: bool = False) -> Path:
    """Start the ranks of a run and wait for them to end; its folder, where its logs and figures are."""
    _check_hosts(config)
    if config.partition != AUTO:
        build_schedule(config)
    _check_paths(config)
    directory = None if config.directory is None else config.path(config.directory)
    if directory is not None and not directory.is_dir():
        raise ConfigError(f"{config.source}: directory is {config.directory!r}: there is no such directory")
    folder = make_run_folder((directory or Path()) / config.log_directory)
    if config.partition == AUTO:
        from vpipe.planning import profile_cache, write_run_plan

        plan = folder.absolute() / "plan.json"
        write_run_plan(config, plan, profile_cache(config))
        arguments = [*arguments, "--set", f"partition={plan}"]
    run_ranks_here(
        arguments,
        config.ranks,
        folder,
        port=config.port,
        directory=directory,
        interpreter=_interpreter(config),
        quiet=quiet,
    )
    return folder


def _check_hosts(config: RunConfig) -> None:
    """Only this host for now; ranks of others are started there, by torchrun."""
    here = {"localhost", "127.0.0.1", "::1", socket.gethostname()}
    for machine in config.machines or ():
        host = machine.rpartition(":")[0]
        if host not in here:
            raise ConfigError(
                f"{config.source}: machines names {machine!r}, which is not this host ({socket.gethostname()}): "
                f"start `torchrun ... -m vpipe train {config.source}` on each host, or name localhost"
            )


def _check_paths(config: RunConfig) -> None:
    """What is not there need not wait for the ranks to find out."""
    for key in ("data_dir", "tokenizer", "pretrained"):
        written = getattr(config, key)
        if written is not None and not config.path(written).exists():
            raise ConfigError(f"{config.source}: {key} is {written!r}: there is no {config.path(written)}")


def _interpreter(config: RunConfig) -> list[str]:
    """What runs `-m vpipe`: this Python, or the one inside the container image."""
    if config.container is None:
        return [sys.executable]
    image = config.path(config.container)
    tool = shutil.which("apptainer") or shutil.which("singularity")
    if tool is None:
        raise ConfigError(
            f"{config.source}: container is {config.container!r}: neither apptainer nor singularity is installed "
            "here: install one, or leave the key out"
        )
    if not image.exists():
        raise ConfigError(f"{config.source}: container is {config.container!r}: there is no such image")
    return [tool, "exec", str(image.absolute()), "python3"]


def _end_with_launcher() -> None:
    """Be killed by the kernel if the launcher dies, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if not Path("/proc", os.environ[LAUNCHER]).exists():
            sys.exit(1)  # it died before the kernel was told
