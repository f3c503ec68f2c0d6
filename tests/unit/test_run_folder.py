"""The folder of a run: its name, what a restarted run leaves in it, and errors in stages.json."""

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from vpipe.errors import ConfigError
from vpipe.observe.hang import rank_states
from vpipe.observe.report import run_data
from vpipe.record import run_folder
from vpipe.record.run_folder import STAMP, make_run_folder, newest_runs, read_metrics, read_stages
from vpipe.record.status import Status, write_status


def test_the_newest_run_is_the_last_one_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock goes, stands, is set back by a day, forward by a year, and back again."""
    day = 86_400.0
    now = 1.8e9
    made = []
    for step in (0, 60, 0, 0, -day, 5, 365 * day, -365 * day, 60):
        now += step
        shown = time.strftime(STAMP, time.localtime(now))
        monkeypatch.setattr(run_folder.time, "strftime", lambda form, *_, shown=shown: shown)
        made.append(make_run_folder(tmp_path / "runs"))
        (made[-1] / "config.yml").write_text("")
        os.utime(made[-1] / "config.yml", (now, now))
    assert len(set(made)) == len(made)
    assert newest_runs(tmp_path / "runs") == made[::-1]
    (tmp_path / "runs" / "cache").mkdir()
    monkeypatch.undo()
    for _ in range(12):  # more than nine in one second, if the machine is quick
        made.append(make_run_folder(tmp_path / "runs"))
        (made[-1] / "config.yml").write_text("")
    assert newest_runs(tmp_path / "runs") == made[::-1]


@pytest.mark.parametrize("jump", [-7200.0, 7200.0])
def test_a_clock_that_was_set_does_not_make_a_rank_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    written = {"time": time.time(), "monotonic": time.monotonic(), "place": "0F3", "seconds": 0.5}
    write_status(Status(0, (0,), os.getpid(), socket.gethostname(), **written), tmp_path)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump)
    (state,) = rank_states(tmp_path)
    assert not state.fate
    assert 0.5 <= state.status.seconds < 1000


def test_the_last_lines_of_a_restarted_run_count(tmp_path: Path) -> None:
    written = [
        ("train", 10, 4.0), ("evaluation", 10, 4.5), ("train", 20, 3.0), ("train", 30, 9.0), ("evaluation", 30, 9.5),
        # Killed; it goes on from a checkpoint after 15 updates, and 30 is not made again yet.
        ("train", 20, 3.5), ("evaluation", 25, 3.25),
    ]  # fmt: skip
    lines = [{"kind": kind, "update": update, "loss": loss} for kind, update, loss in written]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    kept = [(line["kind"], line["update"], line["loss"]) for line in read_metrics(tmp_path)]
    assert kept == [("train", 10, 4.0), ("evaluation", 10, 4.5), ("train", 20, 3.5), ("evaluation", 25, 3.25)]
    shown = run_data(tmp_path, "run")
    assert shown["losses"] == [[10, 4.0], [20, 3.5]]
    assert shown["evaluations"] == [[10, 4.5], [25, 3.25]]
    (tmp_path / "summary.json").write_text(json.dumps({"losses": [[15, 3.75], [16, 3.5]]}))
    assert run_data(tmp_path, "run")["losses"] == [[10, 4.0], [16, 3.75], [17, 3.5]]


STAGES = {
    "schedule": "1f1b", "synchronous": True, "update_interval": 4, "placement": [[0], [1, 2]], "edges": [[0, 1]],
    "cap": None, "blocks": [{"name": "a", "stage": 0, "flops": 3, "cut_bytes": 8, "parameters": 9}],
}  # fmt: skip


def test_stages_are_read_as_they_are_written(tmp_path: Path) -> None:
    assert read_stages(tmp_path) is None
    (tmp_path / "stages.json").write_text(json.dumps(STAGES))
    found = read_stages(tmp_path)
    assert found is not None
    assert found.placement == ((0,), (1, 2))
    assert [block.name for block in found.of_stage(0)] == ["a"]


@pytest.mark.parametrize(
    ("changed", "place"),
    [
        ({"placement": [["x"]]}, "placement.0.0"),
        ({"blocks": [{"name": "a"}]}, "blocks.0.stage"),
        ({"cap": []}, "cap"),
    ],
)
def test_a_mistake_in_stages_is_named(changed: dict[str, Any], place: str, tmp_path: Path) -> None:
    (tmp_path / "stages.json").write_text(json.dumps(STAGES | changed))
    with pytest.raises(ConfigError, match=rf"stages\.json: does not describe stages: {place}: .*; remove it"):
        read_stages(tmp_path)
