"""The maps of `mp_conf.json`, alone and beside the keys that say the same."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from vpipe.config.arguments import build_schedule
from vpipe.config.file import read_config
from vpipe.config.maps import KEYS, Maps, read_maps
from vpipe.errors import ConfigError
from vpipe.schedule import Op, build, holdings

MODULES, RANKS, DEPTHS = KEYS


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "mp_conf.json"


def mistake(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_maps(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


def test_all_three(file: Path) -> None:
    file.write_text(
        json.dumps({MODULES: [0, 0, 0, 1, 1], RANKS: {"0": [0, 1], "1": [2]}, DEPTHS: {"0": 1, "1": 0}})
    )
    assert read_maps(file) == Maps(partition=[3, 2], replicas=[2, 1])


def test_each_may_be_missing(file: Path) -> None:
    file.write_text("{}")
    assert read_maps(file) == Maps(None, None)


@pytest.mark.parametrize(
    ("maps", "message"),
    [
        ([1], "holds [1], not the maps: write"),
        (
            {"stage_to_ranks_map": {}},
            "unknown key 'stage_to_ranks_map' (its value is {}): did you mean 'stage_to_rank",
        ),
        ({"x": 1}, "unknown key 'x' (its value is 1): known keys are module_to_stage_map, "),
        ({MODULES: {}}, "module_to_stage_map is {}: write one stage for each block"),
        ({MODULES: []}, "module_to_stage_map is []"),
        ({MODULES: [1]}, "module_to_stage_map, block 0: the stage is 1, expected 0"),
        ({MODULES: [0, 0, 2]}, "module_to_stage_map, block 2: the stage is 2, expected 0 or 1"),
        ({MODULES: [0, 1, 0]}, "block 2: the stage is 0, expected 1 or 2"),
        ({MODULES: [0, True]}, "block 1: the stage is True, expected 0 or 1"),
        ({MODULES: [0, 1.0]}, "block 1: the stage is 1.0, expected 0 or 1"),
        ({RANKS: [[0]]}, 'stage_to_rank_map is [[0]]: write {"0": [0, 1], "1": [2]} or the like'),
        ({RANKS: {}}, "stage_to_rank_map is {}"),
        ({RANKS: {"1": [0]}}, 'it has 1 stages, but no "0": number them from "0" to "0"'),
        ({RANKS: {"0": [0], "01": [1]}}, 'it has 2 stages, but no "1"'),
        ({RANKS: {"0": [0], "1": 1}}, "stage_to_rank_map, stage 1: 1 is no list of ranks"),
        ({RANKS: {"0": [0], "1": []}}, "stage_to_rank_map, stage 1: [] is no list of ranks"),
        ({RANKS: {"0": [0, 0]}}, "stage 0: the rank is 0: write each rank from 0 to 1 once"),
        ({RANKS: {"0": [1], "1": [2]}}, "stage 1: the rank is 2: write each rank from 0 to 1 once"),
        (
            {DEPTHS: {"0": False}},
            "stage_to_depth_map, stage 0: False is no number of forwards: write one from 0",
        ),
        ({DEPTHS: {"0": 1, "1": -1}}, "stage_to_depth_map, stage 1: -1 is no number of forwards"),
        (
            {DEPTHS: {"0": 0, "1": 2, "2": 0}},
            "stage_to_depth_map is [0, 2, 0]: no stage may run fewer forwards ahead than the next one, else that one "
            'waits for ever for its first backward: the usual one is {"0": 2, "1": 1, "2": 0}',
        ),
        (
            {MODULES: [0, 1, 2], RANKS: {"0": [0], "1": [1]}},
            "the maps differ in the number of stages: module_to_stage_map has 3, stage_to_rank_map has 2",
        ),
    ],
)
def test_mistakes(file: Path, maps: Any, message: str) -> None:
    file.write_text(json.dumps(maps))
    assert message in mistake(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read as JSON"),
        ("{", "cannot be read as JSON"),
        ("9" * 5000, "JSON"),
        (
            '{"module_to_stage_map": ' + "[" * 900 + "]" * 900 + "}",
            "block 0: the stage is [[[[...]]]], expected 0",
        ),
        ("[" * 100_000, "cannot be read as JSON"),
    ],
)
def test_files_that_hold_no_maps(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    assert message in mistake(file)


def test_no_file(file: Path) -> None:
    assert mistake(file) == "cannot be read: No such file or directory"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 4) | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from("012") | st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(found=st.dictionaries(st.sampled_from(KEYS), json_values) | json_values)
def test_any_json_is_read_or_refused_in_one_line(file: Path, found: Any) -> None:
    file.write_text(json.dumps(found))
    outcome = maps_or_refusal(file)
    if isinstance(outcome, str):
        assert "\n" not in outcome
    else:
        assert all(count > 0 for count in (*(outcome.partition or ()), *(outcome.replicas or ())))


def maps_or_refusal(path: Path) -> Maps | str:
    try:
        return read_maps(path)
    except ConfigError as error:
        return str(error)


@given(blocks=st.lists(st.integers(1, 5), min_size=1, max_size=6), data=st.data())
def test_what_a_partition_and_replicas_say_is_read_back(file: Path, blocks: list[int], data: Any) -> None:
    replicas = data.draw(st.lists(st.integers(1, 3), min_size=len(blocks), max_size=len(blocks)))
    firsts = [sum(replicas[:stage]) for stage in range(len(replicas))]
    written = {
        MODULES: [stage for stage, count in enumerate(blocks) for _ in range(count)],
        RANKS: {str(s): list(range(firsts[s], firsts[s] + count)) for s, count in enumerate(replicas)},
    }
    file.write_text(json.dumps(written))
    maps = read_maps(file)
    assert (maps.partition, maps.replicas) == (blocks, replicas)


@given(replicas=st.lists(st.integers(1, 3), min_size=1, max_size=4), mapped=st.booleans())
def test_depths_are_those_of_the_schedule(file: Path, replicas: list[int], mapped: bool) -> None:
    """Counted in 1F1B's own programs: forwards before the first backward, less the one that belongs to it."""
    schedule = build("1f1b", len(replicas), 100, replicas=replicas)
    depths = [
        [action.op for action in schedule.program(ranks[0])].index(Op.B) - 1 for ranks in schedule.placement
    ]
    written: dict[str, Any] = {DEPTHS: {str(stage): depth for stage, depth in enumerate(depths)}}
    if mapped:
        written[RANKS] = {str(stage): list(ranks) for stage, ranks in enumerate(schedule.placement)}
    file.write_text(json.dumps(written))
    given_too = None if mapped else replicas
    assert read_maps(file, given_too) == Maps(None, replicas if mapped else None, None)
    written[DEPTHS]["0"] += 1
    file.write_text(json.dumps(written))
    assert read_maps(file, given_too).depth == [depths[0] + 1, *depths[1:]]


def test_the_depths_of_the_guides_are_turned_round(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = configured(file, {DEPTHS: {"0": 0, "1": 2, "2": 4, "3": 6}}, stages=4, sync_mode="asp")
    config = read_config(path)
    assert config.depth == [6, 4, 2, 0]
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"warning: {file}: stage_to_depth_map is {{'0': 0, '1': 2, '2': 4, '3': 6}}, the wrong way round: "
        '{"0": 6, "1": 4, "2": 2, "3": 0} is taken, because the first stage runs most forwards before its first '
        "backward"
    )
    assert holdings(replace(build_schedule(config), minibatches=40))[0] == (7, 7, 6)
    read_config(configured(file, {DEPTHS: {"0": 6, "1": 4, "2": 2, "3": 0}}, stages=4, depth=[6, 4, 2, 0]))
    assert not capsys.readouterr().err


def test_schedules_with_a_warm_up_of_their_own_do_not_use_depths(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = read_config(configured(file, {DEPTHS: {"0": 4, "1": 0}}, stages=2, schedule="zb-v"))
    assert config.depth is None
    assert "stage_to_depth_map is not used: schedule 'zb-v' has a warm-up" in capsys.readouterr().err
    read_config(configured(file, {DEPTHS: {"0": 1, "1": 0}}, stages=2, schedule="zb-v"))
    assert not capsys.readouterr().err, "what is usual needs no word"


def test_depths_of_uneven_replicas_that_the_run_gives(file: Path) -> None:
    assert read_config(configured(file, {DEPTHS: {"0": 2, "1": 0}}, replicas=[1, 2])).depth is None
    assert read_config(configured(file, {DEPTHS: {"0": 1, "1": 0}}, replicas=[1, 2])).depth == [1, 0]


TWO = {MODULES: [0, 0, 0, 1, 1], RANKS: {"0": [0, 1], "1": [2]}}


def configured(file: Path, maps: Any, **values: Any) -> Path:
    file.write_text(json.dumps(maps))
    path = file.parent / "run.yml"
    path.write_text(yaml.safe_dump({"config_file": file.name, **values}))
    return path


@pytest.mark.parametrize("given_too", [{}, {"partition": [3, 2]}, {"replicas": [2, 1]}, {"stages": 2}])
def test_the_maps_give_partition_and_replicas(file: Path, given_too: dict[str, Any]) -> None:
    path = configured(file, TWO, **given_too)
    config = read_config(path)
    assert (config.partition, config.replicas) == ([3, 2], [2, 1])
    assert (config.positions, config.ranks, config.source) == (2, 3, path)


def test_a_file_without_maps_changes_nothing(file: Path) -> None:
    config = read_config(configured(file, {}, stages=3, batch_size=4))
    assert (config.partition, config.replicas, config.stages, config.batch_size) == (None, None, 3, 4)


def test_maps_beside_a_plan(file: Path) -> None:
    plan = file.parent / "vpipe.json"
    plan.write_text('{"partition": [3, 2], "recompute_ratio": [0.7, 0]}')
    config = read_config(configured(file, TWO, partition="vpipe.json"))
    assert (config.partition, config.policies) == ([3, 2], ["keep", *["recompute"] * 2, "keep", "keep"])
    plan.write_text('{"partition": [4, 1]}')
    with pytest.raises(
        ConfigError, match=r"run.yml: partition is \[4, 1\], but .*mp_conf.json says \[3, 2\]"
    ):
        read_config(file.parent / "run.yml")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"partition": [2, 3]}, "run.yml: partition is [2, 3], but {file} says [3, 2]: make the two equal"),
        ({"replicas": [1, 2]}, "run.yml: replicas is [1, 2], but {file} says [2, 1]"),
        (
            {"machines": ["a:0", "a:1"]},
            "{file}: replicas is [2, 1]: they add up to 3, but `machines` names 2",
        ),
        ({"stages": 3}, "{file}: replicas is [2, 1]: give one number for each of the 3 stages"),
    ],
)
def test_maps_that_contradict_the_file(file: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(configured(file, TWO, **values))
    assert message.replace("{file}", str(file)) in str(caught.value)
