"""The maps of an `mp_conf.json`: modules to stages, stages to ranks, stages to warm-up depths.

    {"module_to_stage_map": [0, 0, 0, 1, 1],            blocks 0 to 2 on stage 0, 3 and 4 on stage 1
     "stage_to_rank_map": {"0": [0, 1], "1": [2]},      two replicas of stage 0, one of stage 1
     "stage_to_depth_map": {"0": 1, "1": 0}}            forwards before a stage's first backward

Each may be missing. They are the guides' form of the keys `partition` and `replicas`; the depths follow
from the ranks of the stages, so they are only checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vpipe.errors import ConfigError
from vpipe.schedule.staircase import depths
from vpipe.system.files import read_json, short_repr
from vpipe.system.validation import unknown_key

MODULES, RANKS, DEPTHS = KEYS = ("module_to_stage_map", "stage_to_rank_map", "stage_to_depth_map")


class Maps(NamedTuple):
    """What the maps of a file say; None if the file does not hold the map."""

    partition: list[int] | None
    """Blocks of each stage."""
    replicas: list[int] | None
    """Ranks of each stage."""


def read_maps(path: Path, replicas: Sequence[int] | None = None) -> Maps:
    """The maps of a file, checked one by one and against each other.

    `replicas` are the ranks of each stage, where another file says it.
    """
    found = read_json(path)
    try:
        return _maps(found, replicas)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def _maps(found: Any, replicas: Sequence[int] | None) -> Maps:
    if not isinstance(found, dict):
        raise ValueError(
            f'holds {short_repr(found)}, not the maps: write {{"{RANKS}": {{"0": [0], "1": [1]}}}}'
        )
    for key, value in found.items():
        if key not in KEYS:
            raise ValueError(unknown_key(key, value, KEYS))
    readers = {MODULES: _blocks, RANKS: _ranks, DEPTHS: _depths}
    maps = {key: read(found[key]) for key, read in readers.items() if key in found}
    if len({len(stages) for stages in maps.values()}) > 1:
        listed = ", ".join(f"{key} has {len(stages)}" for key, stages in maps.items())
        raise ValueError(f"the maps differ in the number of stages: {listed}: make them equal")
    if DEPTHS in maps:
        stages = len(maps[DEPTHS])
        ranks = maps.get(RANKS) or replicas or ()
        _check_depths(found[DEPTHS], maps[DEPTHS], ranks if len(ranks) == stages else [1] * stages)
    return Maps(maps.get(MODULES), maps.get(RANKS))


def _blocks(value: Any) -> list[int]:
    """The number of blocks of each stage."""
    if not isinstance(value, list) or not value:
        raise ValueError(
            f"{MODULES} is {short_repr(value)}: write one stage for each block, such as [0, 0, 1, 1]"
        )
    allowed: tuple[int, ...] = (0,)  # the stages that the next block may be on
    for block, stage in enumerate(value):
        if type(stage) is not int or stage not in allowed:
            expected = " or ".join(map(str, allowed))
            raise ValueError(
                f"{MODULES}, block {block}: the stage is {short_repr(stage)}, expected {expected}: "
                "stages start with 0 and rise by one, without gaps"
            )
        allowed = (stage, stage + 1)
    return list(Counter(value).values())


def _ranks(value: Any) -> list[int]:
    """The number of ranks of each stage."""
    example = '{"0": [0, 1], "1": [2]}'
    following = 0
    stages = _by_stage(RANKS, value, example)
    for stage, ranks in enumerate(stages):
        if not isinstance(ranks, list) or not ranks:
            raise ValueError(
                f"{RANKS}, stage {stage}: {short_repr(ranks)} is no list of ranks: write {example} or the like"
            )
        for rank in ranks:
            if type(rank) is not int or rank != following:
                raise ValueError(
                    f"{RANKS}, stage {stage}: the rank is {short_repr(rank)}, expected {following}: "
                    "write each rank once, in order, from 0 on"
                )
            following += 1
    return [len(ranks) for ranks in stages]


def _depths(value: Any) -> list[Any]:
    return _by_stage(DEPTHS, value, '{"0": 1, "1": 0}')


def _check_depths(value: Any, found: list[Any], replicas: Sequence[int]) -> None:
    """Whether they are those that the schedule has with so many ranks of each stage."""
    right = depths(replicas)
    if not all(type(depth) is int for depth in found) or found != right:
        written = "{" + ", ".join(f'"{stage}": {depth}' for stage, depth in enumerate(right)) + "}"
        turned = " (it is the wrong way round)" if found == right[::-1] else ""
        raise ValueError(
            f"{DEPTHS} is {short_repr(value)}{turned}: the first of {len(found)} stages runs {right[0]} forwards "
            f"before its first backward, the last none: write {written}"
        )


def _by_stage(name: str, value: Any, example: str) -> list[Any]:
    """The values in the order of the stages that they belong to."""
    if not isinstance(value, dict) or not value:
        raise ValueError(f"{name} is {short_repr(value)}: write {example} or the like")
    for stage in map(str, range(len(value))):
        if stage not in value:
            raise ValueError(
                f'{name} is {short_repr(value)}: it has {len(value)} stages, but no "{stage}": '
                f'number them from "0" to "{len(value) - 1}"'
            )
    return [value[str(stage)] for stage in range(len(value))]
