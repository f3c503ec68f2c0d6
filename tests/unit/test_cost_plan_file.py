"""The plan's file."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.drawing import draws
from tests.unit.test_cost_files import anything, examples
from vpipe.cost import POLICIES, Plan, read_plan, write_plan
from vpipe.cost.fields import file_fields
from vpipe.errors import VPipeError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "plan.json"


def read(path: Path, values: Any) -> Plan:
    path.write_text(json.dumps(values))
    return read_plan(path)


def test_the_examples_of_the_docs(file: Path) -> None:
    short, whole, *_ = examples("Plan")
    file.write_text(short)
    assert read_plan(file) == Plan((2, 2), ("keep", "recompute", "keep", "keep"))
    file.write_text(whole)
    plan = read_plan(file)
    assert (plan.schedule, plan.replicas, plan.minibatches, plan.batch_size) == ("pipedream", (1, 1), 32, 8)
    write_plan(plan, file)
    assert json.loads(file.read_text()) == json.loads(whole)


def test_the_guides_file_counts_from_the_end_of_a_stage(file: Path) -> None:
    plan = read(file, {"partition": [12, 13, 13, 11], "recompute_ratio": [0.3, 0, 0, 0]})
    assert plan.policies == ("keep",) * 9 + ("recompute",) * 3 + ("keep",) * 37  # int(0.3 * 12)
    assert read(file, {"partition": [10], "recompute_ratio": 0.3}).policies.count("recompute") == 3
    assert read(file, {"partition": [2, 1], "recompute_ratio": 1}).policies == ("recompute",) * 3
    assert read(file, {"partition": [2, 1]}).policies == ("keep",) * 3


@given(st.integers(1, 400).flatmap(lambda blocks: st.tuples(st.just(blocks), st.integers(0, blocks))))
def test_a_ratio_that_is_written_stands_for_as_many_blocks(counts: tuple[int, int]) -> None:
    blocks, recomputed = counts
    plan = Plan((blocks,), ("keep",) * (blocks - recomputed) + ("recompute",) * recomputed)
    ratios = plan.ratios()
    assert ratios is not None
    assert int(ratios[0] * blocks) == recomputed


def test_a_ratio_that_was_rounded_to_the_nearest_is_read(file: Path) -> None:
    written = {"partition": [3], "policies": ["keep", "keep", "recompute"], "recompute_ratio": [0.3333]}
    assert read(file, written).policies == ("keep", "keep", "recompute")


@pytest.mark.parametrize(
    ("policies", "ratios"),
    [
        (("keep", "keep", "keep"), [0.0, 0.0]),
        (("keep", "recompute", "keep"), [0.5, 0.0]),
        (("recompute", "keep", "keep"), None),
        (("keep", "keep", "swap"), None),
    ],
)
def test_the_ratio_is_written_where_the_policies_have_its_shape(
    file: Path, policies: tuple[str, ...], ratios: list[float] | None
) -> None:
    write_plan(Plan((2, 1), policies), file)
    assert json.loads(file.read_text()).get("recompute_ratio") == ratios
    assert json.loads(file.read_text())["partition"] == [2, 1]


counts = st.lists(st.integers(1, 9), min_size=1, max_size=4)


@draws(40)
@given(counts, st.data())
def test_what_is_written_is_read(file: Path, partition: list[int], data: st.DataObject) -> None:
    """With and without the exact policies: the ratios stand for them where they are written."""
    blocks = sum(partition)
    plan = Plan(
        partition=tuple(partition),
        policies=tuple(
            data.draw(st.lists(st.sampled_from(tuple(POLICIES)[:2]), min_size=blocks, max_size=blocks))
        ),
        schedule="2bw",
        minibatches=data.draw(st.none() | st.integers(1, 9)),
        update_interval=7,
        batch_size=3,
        prediction={"step_time": 0.5, "peak_memory": [1, 2]},
    )
    write_plan(plan, file)
    assert read_plan(file) == plan
    written = json.loads(file.read_text())
    if "recompute_ratio" in written:
        assert read(file, {key: value for key, value in written.items() if key != "policies"}) == plan


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "holds [], not an object: expected an object with partition"),
        (
            {},
            "partition is missing: expected a list, each entry blocks of a stage: a whole number, 1 or more",
        ),
        (
            {"partition": [3, 0]},
            "partition, entry 1 is 0: expected blocks of a stage: a whole number, 1 or more",
        ),
        (
            {"partition": [1], "recompute_ratio": [0, 0]},
            "recompute_ratio has 2 entries, but the partition has 1 stages: give one for each",
        ),
        (
            {"partition": [1], "recompute_ratio": [1.5]},
            "recompute_ratio, entry 0 is 1.5: expected a number, from 0 to 1",
        ),
        (
            {"partition": [2], "policies": ["keep"]},
            "policies has 1 entries, but the partition holds 2 blocks",
        ),
        ({"partition": [1], "policies": ["kept"]}, "policies, entry 0 is 'kept': expected one of keep, "),
        (
            {"partition": [2], "policies": ["keep", "keep"], "recompute_ratio": [0.5]},
            "recompute_ratio is [0.5], but the policies say otherwise: remove one of the two",
        ),
        (
            {"partition": [1], "schedule": "1f1"},
            "schedule is '1f1': expected the path of a .csv file, or the name of a schedule: did you mean '1f1b'?",
        ),
        ({"partition": [1], "replicas": "2"}, "replicas is '2': expected a list"),
        ({"partition": [1], "minibatches": 0}, "minibatches is 0: expected minibatches of a run"),
        (
            {"partition": [1], "prediction": {"time": "1"}},
            "prediction: time is '1': expected a number or a list",
        ),
        (
            {"partition": [1], "recompute_ratios": 0},
            "unknown key 'recompute_ratios' (its value is 0): did you mean 'recompute_ratio'?",
        ),
    ],
)
def test_mistakes(file: Path, values: Any, message: str) -> None:
    with pytest.raises(VPipeError) as caught:
        read(file, values)
    assert str(caught.value).startswith(f"{file}: {message}")


@draws(60)
@given(
    anything | st.dictionaries(st.sampled_from([*file_fields(Plan), "recompute_ratio"]), anything | counts)
)
def test_anything_else_is_a_clear_error(file: Path, values: Any) -> None:
    with suppress(VPipeError):
        read(file, values)
