"""Check that all ranks have the same versions and configuration."""

from __future__ import annotations

import platform
from typing import Any

import torch

import vpipe
from vpipe.communication import World
from vpipe.config import RunConfig
from vpipe.config.settings import PATHS
from vpipe.errors import ConfigError

OF_THE_HOST = {*PATHS, "log_directory", "port", "python_path"} - {"partition"}
"""Keys that may be written differently on each host; what is in the files is compared elsewhere."""


def check_same_config(world: World, config: RunConfig) -> None:
    """Raise on every rank if one differs from rank 0, with the rank and the differences."""
    mine = {
        "version of torch": torch.__version__,
        "version of vpipe": vpipe.__version__,
        "version of Python": ".".join(platform.python_version_tuple()[:2]),
        **config.model_dump(mode="json", exclude=OF_THE_HOST),
    }
    everybody: list[dict[str, Any]] = world.all_gather("versions and configuration", mine)
    for rank, theirs in enumerate(everybody):
        differences = [
            f"{key} {theirs.get(key)!r} and {everybody[0].get(key)!r}"
            for key in sorted({*theirs, *everybody[0]})
            if theirs.get(key) != everybody[0].get(key)
        ]
        if differences:
            raise ConfigError(
                f"rank {rank} differs from rank 0: {'; '.join(differences)}: "
                "start every rank from the same file and the same installation"
            )
