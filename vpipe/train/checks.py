"""What is checked of a run's configuration before any rank starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vpipe.config.arguments import build_schedule, check_blocks
from vpipe.config.file import AUTO
from vpipe.errors import ConfigError
from vpipe.system.files import exists

if TYPE_CHECKING:
    from vpipe.config import RunConfig


def check_choosable(config: RunConfig) -> None:
    """Raise where there is no plan by which `compress: auto` could choose."""
    if config.compress == AUTO and config.partition != AUTO and config.planned is None:
        raise ConfigError(
            f"{config.source}: compress is {AUTO!r}, which simulates the plan of the run: set partition: auto, or to a "
            "file of `vpipe plan`"
        )


def stages_of_ranks(config: RunConfig) -> list[str]:
    """The stages of each rank in words, for messages; raises if schedule, partition and model do not fit together."""
    if config.partition == AUTO:
        for key in ("policies", "recompute_ratio", "recompute", "replicas", "chunks", "depth", "placement"):
            if getattr(config, key) is not None:
                raise ConfigError(
                    f"{config.source}: {key} is {getattr(config, key)!r}, but partition is {AUTO!r}, which plans it: "
                    "leave one of the two out"
                )
        return ["some stage"] * config.ranks
    schedule = build_schedule(config)
    check_blocks(config, schedule)
    return [" and ".join(f"stage {s}" for s in schedule.stages_of(rank)) for rank in range(config.ranks)]


def check_paths(config: RunConfig) -> None:
    """Raise for missing files before any rank starts."""
    for key in ("data_dir", "tokenizer", "pretrained"):
        written = getattr(config, key)
        if written is not None and not exists(config.path(written)):
            raise ConfigError(f"{config.source}: {key} is {written!r}: there is no {config.path(written)}")
