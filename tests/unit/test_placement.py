"""Stages on other ranks than in order: the same programs, and the same training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.examples import example
from tests.unit.test_verify import check as verified
from vpipe.config.arguments import build_schedule
from vpipe.config.file import read_config
from vpipe.cost import Plan, read_plan, write_plan
from vpipe.errors import ScheduleError, VPipeError
from vpipe.schedule import Schedule, build, check

PLACED = [
    ("1f1b", (2, 1), [[2, 0], [1]]),
    ("zb-h1", (1, 2), [[1], [2, 0]]),
    ("pipedream", (2, 1), [[0, 2], [1]]),
    ("2bw", (1, 1, 1), [[1], [2], [0]]),
    ("interleaved", (2, 2), [[0, 2], [1, 3]]),
    ("zb-v", (1, 1), [[1], [0]]),
]


def built(name: str, replicas: tuple[int, ...], placement: list[list[int]] | None) -> Schedule:
    return build(name, len(replicas), 6, replicas=replicas, placement=placement)


@pytest.mark.parametrize(("name", "replicas", "placement"), PLACED)
def test_programs_move_with_their_ranks(
    name: str, replicas: tuple[int, ...], placement: list[list[int]]
) -> None:
    plain, placed = built(name, replicas, None), built(name, replicas, placement)
    check(placed)
    ranks = [rank for own in placement for rank in own]
    assert placed.placement[: len(replicas)] == tuple(map(tuple, placement))
    for place, rank in enumerate(ranks):
        assert list(placed.program(rank)) == list(plain.program(place))
        assert placed.stages_of(rank) == plain.stages_of(place)
    assert (placed.lag, placed.filling) == (plain.lag, plain.filling)


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (
            [[0], [1]],
            "placement 0; 1 has 1, 1 ranks on its positions, but replicas are 2, 1: make the two equal",
        ),
        ([[0, 1], [1]], "placement 0, 1; 1: name every rank from 0 to 2 once"),
        ([[0, 3], [1]], "name every rank from 0 to 2 once"),
    ],
)
def test_mistakes(placement: list[list[int]], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        built("1f1b", (2, 1), placement)


@pytest.fixture
def _one_capture(capture_once: None) -> Iterator[None]:
    return


@pytest.mark.usefixtures("_one_capture")
@pytest.mark.parametrize(
    ("name", "replicas", "placement"),
    [PLACED[0], PLACED[2], *(pytest.param(*case, marks=pytest.mark.long) for case in (PLACED[3], PLACED[5]))],
)
def test_training_equals_the_plain_model(
    name: str, replicas: tuple[int, ...], placement: list[list[int]]
) -> None:
    options: dict[str, Any] = {"schedule": name, "replicas": list(replicas), "placement": placement}
    result = verified(example("sequential", dropout=0.1), sum(replicas), **options)
    assert result.ok, result


def test_a_plan_places_the_stages_of_a_run(tmp_path: Path) -> None:
    plan = Plan((3, 2), ("keep",) * 5, "1f1b", (2, 1), 6, placement=((2, 0), (1,)))
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan
    (tmp_path / "run.yml").write_text("num_layers: 2\npartition: plan.json\n")
    config = read_config(tmp_path / "run.yml")
    assert config.placement == [[2, 0], [1]]
    assert build_schedule(config).placement == ((2, 0), (1,))
    (tmp_path / "run.yml").write_text("num_layers: 2\npartition: plan.json\nreplicas: [1, 2]\n")
    assert read_config(tmp_path / "run.yml").placement is None
    (tmp_path / "run.yml").write_text("num_layers: 2\npartition: [3, 2]\nconfig_file: maps.json\n")
    (tmp_path / "maps.json").write_text(json.dumps({"stage_to_rank_map": {"0": [1, 0], "1": [2]}}))
    config = read_config(tmp_path / "run.yml")
    assert (config.placement, config.replicas) == ([[1, 0], [2]], [2, 1])
    (tmp_path / "run.yml").write_text("num_layers: 2\npartition: [3, 2]\nplacement: [[0, 0], [1]]\n")
    with pytest.raises(VPipeError, match="placement"):
        build_schedule(read_config(tmp_path / "run.yml"))
