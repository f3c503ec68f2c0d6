"""What the stages of a run are: `stages.json`, written when training begins, so that a run that dies has one too."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from vpipe.errors import ConfigError
from vpipe.system.files import read_json

FILE = "stages.json"


class BlockFacts(NamedTuple):
    name: str
    stage: int
    flops: int
    cut_bytes: int
    """What crosses the cut behind the block."""
    parameters: int


class StageFacts(NamedTuple):
    schedule: str
    synchronous: bool
    update_interval: int
    placement: tuple[tuple[int, ...], ...]
    """The ranks of each stage."""
    edges: tuple[tuple[int, int], ...]
    blocks: tuple[BlockFacts, ...]
    cap: int | None
    """Memory that a rank may use, if the configuration says so."""

    @property
    def partition(self) -> tuple[int, ...]:
        return tuple(
            sum(block.stage == stage for block in self.blocks) for stage in range(len(self.placement))
        )

    def of_stage(self, stage: int) -> list[BlockFacts]:
        return [block for block in self.blocks if block.stage == stage]


def read_stages(folder: Path) -> StageFacts | None:
    """None for a run that has no such file."""
    path = folder / FILE
    if not path.is_file():
        return None
    told: dict[str, Any] = read_json(path)
    try:
        return StageFacts(
            str(told["schedule"]),
            bool(told["synchronous"]),
            int(told["update_interval"]),
            tuple(tuple(map(int, ranks)) for ranks in told["placement"]),
            tuple((int(producer), int(reader)) for producer, reader in told["edges"]),
            tuple(
                BlockFacts(
                    str(b["name"]),
                    int(b["stage"]),
                    int(b["flops"]),
                    int(b["cut_bytes"]),
                    int(b["parameters"]),
                )
                for b in told["blocks"]
            ),
            None if told["cap"] is None else int(told["cap"]),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path}: does not describe stages: {type(error).__name__}: {error}; remove it to do without"
        ) from None
