"""The output and files of `vpipe simulate`."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.schedules import NAMES
from tests.unit.test_cost_files import examples
from vpipe.cli.planning import simulate as simulate_command
from vpipe.errors import VPipeError
from vpipe.system.units import duration

Files = tuple[Path, Path]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    profile, plan = tmp_path / "profile.json", tmp_path / "plan.json"
    profile.write_text(examples("Profile")[0])
    plan.write_text(examples("Plan")[0])
    return profile, plan


def test_as_json(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    simulate_command(*files, schedule="1f1b", minibatches=4, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["schedule"], found["minibatches"], found["batch_size"]) == ("1f1b", 4, 8)
    assert found["samples_per_s"] == pytest.approx(8 * 4 / found["step_time"])
    assert found["steady"] is None
    first = found["ranks"][0]
    assert first["peak_memory"] == sum(first["memory"].values())
    assert first["memory"]["activations"] == 2 * (4_000_000 + 4_000_000) + 50_000_000 - 4_000_000


def test_as_a_table(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    simulate_command(*files)
    shown = capsys.readouterr().out
    assert "vpipe, 20 minibatches of 8 (steady state): " in shown
    assert "samples/s" in shown
    assert "activations" in shown
    assert "more memory" not in shown


def test_what_does_not_fit_is_marked(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    values = json.loads(files[0].read_text())
    values["device"]["memory"] = 10**6
    files[0].write_text(json.dumps(values))
    simulate_command(*files, minibatches=3)
    shown = capsys.readouterr().out
    assert "! 2 ranks need more memory than the device's 976.6 KiB" in shown
    assert "too few for a steady state" in shown


def test_a_slow_host_is_named(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    values = json.loads(files[0].read_text())
    for block in values["blocks"]:
        block["host"] = {"minibatch": 100.0}
    files[0].write_text(json.dumps(values))
    simulate_command(*files)
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "times as slow as its device: its host launches kernels more slowly (larger minibatches or" in shown
    )
    values["blocks"][1]["host"]["minibatch"] = -1
    files[0].write_text(json.dumps(values))
    with pytest.raises(
        VPipeError, match=r"blocks, entry 1 .*: host: minibatch is -1: expected seconds, 0 or more"
    ):
        simulate_command(*files)


def test_mistakes(files: Files) -> None:
    with pytest.raises(VPipeError, match="minibatches is 0: it must be a whole number, 1 or more"):
        simulate_command(*files, minibatches=0)
    with pytest.raises(VPipeError, match="cannot be written: Is a directory"):
        simulate_command(*files, trace=files[0].parent)


@pytest.mark.parametrize("name", NAMES)
def test_the_trace(files: Files, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every action once, on its rank's track; arrows join what was made with what reads it."""
    path = files[0].parent / "trace.json"
    simulate_command(*files, schedule=name, minibatches=6, trace=path)
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    forwards = [event["name"] for event in slices if event["cat"] == "forward"]
    assert sorted(forwards) == sorted(f"{stage}F{minibatch}" for stage in range(2) for minibatch in range(6))
    for rank in {event["tid"] for event in slices}:
        own = [event for event in slices if event["tid"] == rank]
        for before, after in pairwise(own):
            assert after["ts"] >= before["ts"] + before["dur"] - 1e-3
    sent = {event["id"]: event for event in events if event["ph"] == "s"}
    read = {event["id"]: event for event in events if event["ph"] == "f"}
    assert sent.keys() == read.keys()
    assert len(sent) == (0 if name in ("interleaved", "zb-v") else 2 * 6)
    assert all(read[key]["ts"] > sent[key]["ts"] and read[key]["tid"] != sent[key]["tid"] for key in sent)
    counters = [event for event in events if event["ph"] == "C"]
    assert counters
    capsys.readouterr()


def test_the_trace_shows_the_peak(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    path = files[0].parent / "trace.json"
    simulate_command(*files, schedule="pipedream", minibatches=6, as_json=True, trace=path)
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    events = json.loads(path.read_text())["traceEvents"]
    for rank in ranks:
        held = [e["args"]["bytes"] for e in events if e["name"] == f"memory of rank {rank['rank']}"]
        assert max(held) == rank["peak_memory"]


def test_figures_for_people() -> None:
    assert [duration(value) for value in (2.5, 0.0123, 4e-6)] == ["2.5 s", "12.3 ms", "4 us"]
