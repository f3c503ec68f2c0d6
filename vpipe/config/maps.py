"""The maps of an `mp_conf.json`: modules to stages, stages to ranks, stages to warm-up depths.

    {"module_to_stage_map": [0, 0, 0, 1, 1],            blocks 0 to 2 on stage 0, 3 and 4 on stage 1
     "stage_to_rank_map": {"0": [0, 1], "1": [2]},      two replicas of stage 0, one of stage 1
     "stage_to_depth_map": {"0": 1, "1": 0}}            forwards before a stage's first pair of forward and backward

Each may be missing. They are the guides' form of the keys `partition`, `replicas`, `placement` and `depth`. The guides
print {"0": 0, "1": 2, "2": 4, "3": 6}, which cannot run: in a pipeline the first stage runs most forwards ahead. Depths
that are the wrong way round are turned round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vpipe.errors import ConfigError
from vpipe.schedule.kind import MOST_DEPTH, too_shallow
from vpipe.schedule.program import in_order
from vpipe.schedule.staircase import depths
from vpipe.system.console import warn
from vpipe.system.files import read_json, short_repr
from vpipe.system.validation import unknown_key

MODULES, RANKS, DEPTHS = KEYS = ("module_to_stage_map", "stage_to_rank_map", "stage_to_depth_map")


class Maps(NamedTuple):
    """What the maps of a file say; None if the file does not hold the map."""

    partition: list[int] | None
    """Blocks of each stage."""
    replicas: list[int] | None
    """Ranks of each stage."""
    depth: list[int] | None = None
    """Forwards of each stage before its first pair of forward and backward; None also if they are the usual ones."""
    placement: list[list[int]] | None = None
    """The ranks of each stage; None also if they are numbered stage by stage."""


def read_maps(path: Path, replicas: Sequence[int] | None = None) -> Maps:
    """The maps of a file, checked one by one and against each other.

    `replicas` are the ranks of each stage, where another file says it.
    """
    found = read_json(path)
    try:
        maps, turned = _maps(found, replicas)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    if turned:
        warn(f"{path}: {turned}")
    return maps


def _maps(found: Any, replicas: Sequence[int] | None) -> tuple[Maps, str]:
    """The maps, and what was turned round in them."""
    if not isinstance(found, dict):
        raise ValueError(
            f'holds {short_repr(found)}, not the maps: write {{"{RANKS}": {{"0": [0], "1": [1]}}}}'
        )
    for key, value in found.items():
        if key not in KEYS:
            raise ValueError(unknown_key(key, value, KEYS))
    readers: dict[str, Callable[[Any], list[Any]]] = {MODULES: _blocks, RANKS: _ranks, DEPTHS: _depths}
    turned, depth = "", None
    maps: dict[str, Any] = {key: read(found[key]) for key, read in readers.items() if key in found}
    if len({len(stages) for stages in maps.values()}) > 1:
        listed = ", ".join(f"{key} has {len(stages)}" for key, stages in maps.items())
        raise ValueError(f"the maps differ in the number of stages: {listed}: make them equal")
    if DEPTHS in maps:
        stages = len(maps[DEPTHS])
        ranks = [len(own) for own in maps.get(RANKS, ())] or replicas or ()
        counts = ranks if len(ranks) == stages else [1] * stages
        depth = _turned(maps[DEPTHS], counts)
        if depth != maps[DEPTHS]:
            turned = (
                f"{DEPTHS} is {short_repr(found[DEPTHS])}, the wrong way round: {_written(depth)} is taken, because "
                "the first stage runs most forwards before its first backward"
            )
        if depth == depths(counts):
            depth = None
    placed: list[list[int]] | None = maps.get(RANKS)
    if placed is None:
        return Maps(maps.get(MODULES), replicas=None, depth=depth), turned
    placement = None if in_order(placed) else placed
    return Maps(maps.get(MODULES), [len(own) for own in placed], depth, placement), turned


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


def _ranks(value: Any) -> list[list[int]]:
    """The ranks of each stage."""
    example = '{"0": [0, 1], "1": [2]}'
    stages = _by_stage(RANKS, value, example)
    for stage, ranks in enumerate(stages):
        if not isinstance(ranks, list) or not ranks:
            raise ValueError(
                f"{RANKS}, stage {stage}: {short_repr(ranks)} is no list of ranks: write {example} or the like"
            )
    seen: set[int] = set()
    last = sum(map(len, stages)) - 1
    for stage, ranks in enumerate(stages):
        for rank in ranks:
            if type(rank) is not int or not 0 <= rank <= last or rank in seen:
                raise ValueError(
                    f"{RANKS}, stage {stage}: the rank is {short_repr(rank)}: write each rank from 0 to {last} once"
                )
            seen.add(rank)
    return stages


def _depths(value: Any) -> list[int]:
    stages = _by_stage(DEPTHS, value, '{"0": 1, "1": 0}')
    for stage, depth in enumerate(stages):
        if type(depth) is not int or not 0 <= depth <= MOST_DEPTH:
            raise ValueError(
                f"{DEPTHS}, stage {stage}: {short_repr(depth)} is no number of forwards: "
                f"write one from 0 to {MOST_DEPTH}"
            )
    return stages


def _turned(found: list[int], replicas: Sequence[int]) -> list[int]:
    """The depths as they are or, if only that can run, the other way round."""
    for depth in (found, found[::-1]):
        if too_shallow(replicas, depth) is None:
            return depth
    raise ValueError(
        f"{DEPTHS} is {short_repr(found)}: no stage may run fewer forwards ahead than the next one, else that one "
        f"waits for ever for its first backward: the usual one is {_written(depths(replicas))}"
    )


def _written(depth: Sequence[int]) -> str:
    return "{" + ", ".join(f'"{stage}": {ahead}' for stage, ahead in enumerate(depth)) + "}"


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
