"""The directory and the container that a rank runs in: the keys `directory` and `container`.

Our launcher starts ranks there. A rank that torchrun or srun has started begins anew there, in the same process.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vpipe.config.code import code_directories
from vpipe.config.settings import PATHS, is_path
from vpipe.errors import ConfigError
from vpipe.launch.mps import count_gpus
from vpipe.record.run_folder import make_log_directory
from vpipe.system.files import exists, is_folder

if TYPE_CHECKING:
    from vpipe.config import RunConfig

PLACED = "VPIPE_PLACED"
"""Set for a rank that is where the configuration wants it."""
TOOLS = ("apptainer", "singularity")


def rank_directory(config: RunConfig) -> Path | None:
    """The directory that the ranks start in, if the configuration names one."""
    if config.directory is None:
        return None
    directory = config.file("directory")
    if not is_folder(directory):
        raise ConfigError(
            f"{config.source}: directory is {config.directory!r}: there is no such directory, neither beside this file "
            "nor here: make one, or leave the key out"
        )
    return directory


def rank_interpreter(config: RunConfig, arguments: Sequence[str]) -> list[str]:
    """The command that runs `-m vpipe`: this Python, or the one in the container image."""
    if config.container is None:
        return [sys.executable]
    image = config.path(config.container)
    tool = next(filter(None, map(shutil.which, TOOLS)), None)
    if tool is None:
        raise ConfigError(
            f"{config.source}: container is {config.container!r}: neither apptainer nor singularity is installed "
            "here: install one, or leave the key out"
        )
    if not exists(image):
        raise ConfigError(f"{config.source}: container is {config.container!r}: there is no such image")
    inside = os.path.abspath(rank_directory(config) or Path())
    bound = [part for path in _bound_paths(config, arguments) for part in ("--bind", str(path))]
    gpus = ["--nv"] if count_gpus() else []
    return [tool, "exec", *gpus, *bound, "--pwd", inside, str(image.resolve()), "python3"]


def from_elsewhere(config: RunConfig, arguments: Sequence[str]) -> list[str]:
    """The arguments of a rank that may start in another directory: what is relative to this one stays where it is."""
    found = []
    if config.directory is not None:
        paths = {"log_directory": Path(config.log_directory), "directory": config.file("directory")}
        found += [f"{key}={json.dumps(os.path.abspath(path))}" for key, path in paths.items()]
    found += [f"python_path={json.dumps(list(map(str, code_directories(config))))}"] if config.code else []
    return [*arguments, *(part for setting in found for part in ("--set", setting))]


def enter_place(config: RunConfig, arguments: Sequence[str]) -> None:
    """Begin anew in the rank's directory and container, unless this process is there; for a rank that others started.

    Nothing is lost: the rank has imported little so far, and keeps its process, environment and open sockets.
    """
    if PLACED in os.environ or (config.container is None and config.directory is None):
        return
    if config.container is not None:
        make_log_directory(Path(config.log_directory))  # only what exists can be bound
    command = [*rank_interpreter(config, arguments), "-m", "vpipe", *from_elsewhere(config, arguments)]
    directory = rank_directory(config)
    os.environ[PLACED] = "1"
    sys.stdout.flush()
    if directory is not None:
        os.chdir(directory)
    os.execvp(command[0], command)


def _bound_paths(config: RunConfig, arguments: Sequence[str]) -> list[Path]:
    """What a rank reads and writes, as absolute paths; none of them is inside another."""
    values = config.model_dump()
    keys = {*PATHS, "schedule"} - {"container"}
    named = [config.file(key) for key in keys if is_path(key, values[key])]
    named += [config.planned[0]] if config.planned is not None else []
    given = [Path(word) for word in arguments if word.startswith("/")]  # the configuration, --resume
    homes = [path if is_folder(path) else path.parent for path in (*named, *given)]
    wanted = [Path(config.log_directory), Path(), *code_directories(config), *homes]
    paths = _outermost(path for path in wanted if is_folder(path))
    for path in paths:
        if set(str(path)) & set(":,"):
            raise ConfigError(
                f"{config.source}: container is {config.container!r}, which cannot be given {str(path)!r}: a path "
                "with ':' or ',' cannot be bound; rename the folder"
            )
    return paths


def _outermost(paths: Iterable[Path]) -> list[Path]:
    """Without the root: an image has its own."""
    kept: list[Path] = []
    for path in sorted({Path(os.path.abspath(path)) for path in paths}):
        if path != Path("/") and not any(path.is_relative_to(other) for other in kept):
            kept.append(path)
    return kept
