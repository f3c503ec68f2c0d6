"""Bounds of a run of ten million updates: lines that are written, curves, and what is read back."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from vpipe.observe.diagnosis import diagnose
from vpipe.observe.report import run_data
from vpipe.observe.screen import picture
from vpipe.record.run_folder import read_lines, read_metrics
from vpipe.record.status import Status, write_status
from vpipe.record.thinning import LINES, POINTS, Curve, is_written
from vpipe.system.console import PlainConsole

UPDATES = 10_000_000


def reports(updates: int) -> list[int]:
    """Those that are written of so many, without asking for each: the stride only grows."""
    found, number, stride = [], 1, 1
    while number <= updates:
        if is_written(number):
            found.append(number)
        stride = 1 << ((number - 1) // LINES).bit_length()
        number = number // stride * stride + stride
    return found


def test_reports_get_rarer() -> None:
    found = reports(UPDATES)
    assert found[:LINES] == list(range(1, LINES + 1))
    assert len(found) < 7 * LINES
    gaps = [after - before for before, after in pairwise(found)]
    assert gaps == sorted(gaps)
    assert gaps[-1] <= 0.11 * found[-1] / LINES * 10, "the newest ones are still close together"
    assert [n for n in range(1, 50_000) if is_written(n)] == [n for n in found if n < 50_000]


@pytest.mark.parametrize("count", [0, 1, 5, POINTS - 1, POINTS, POINTS + 1, 3 * POINTS, 300_000])
def test_a_curve_is_short_and_even_and_ends_with_the_newest_point(count: int) -> None:
    curve = Curve[tuple[int, float]]()
    for update in range(count):
        curve.add((update, float(update)))
    points = list(curve)
    assert len(points) == len(curve) <= POINTS
    if count < POINTS:
        assert [update for update, _ in points] == list(range(count))
        return
    assert points[0][0] == 0
    assert points[-1][0] == count - 1
    gaps = {after[0] - before[0] for before, after in pairwise(points[:-1])}
    assert len(gaps) == 1
    assert len(points) >= POINTS // 2


def test_points_can_be_taken_back() -> None:
    curve = Curve[int](limit=8)
    for number in range(20):
        curve.add(number)
    curve.drop_while(lambda point: point >= 9)
    assert max(curve) < 9
    for number in range(9, 40):
        curve.add(number)
    assert list(curve) == sorted(set(curve))
    assert len(curve) <= 8
    assert list(curve)[-1] == 39


@pytest.fixture
def long_run(tmp_path: Path) -> Path:
    """What a run of ten million updates with print_frequency 1 leaves, but for every tenth line of it."""
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for update in reports(UPDATES)[::10]:
            line = {
                "kind": "train",
                "update": update,
                "loss": 1.0 + 1e5 / (update + 1e5),
                "samples_per_s": 9.0,
            }
            file.write(json.dumps(line | {"learning_rate": 1e-3}) + "\n")
    for rank in range(2):
        with (tmp_path / f"output.log.{rank}").open("wb") as file:
            file.truncate(1 << 33)  # a log of 8 GiB, which takes no room
        status = Status(rank, (rank,), 1, "elsewhere", 0.0, state="ended", updates=UPDATES, total=UPDATES)
        write_status(status, tmp_path)
    return tmp_path


def test_the_files_of_a_long_run_are_read_in_bounded_memory(long_run: Path) -> None:
    lines = sum(1 for _ in read_lines(long_run / "metrics.jsonl"))
    assert lines < LINES
    found = read_metrics(long_run)
    assert len(found) <= POINTS
    assert [found[0]["update"], found[-1]["update"]] == [1, max(reports(UPDATES)[::10])]
    assert len(run_data(long_run, "run")["losses"]) <= POINTS
    assert {finding.topic: finding.grade for finding in diagnose(long_run)}["loss"] == "fine"
    picture(long_run, PlainConsole(width=160))
