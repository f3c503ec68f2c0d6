"""A run that is asked to end: it saves, says so by its exit code, and goes on as if nothing had been."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.command import end, rank_process, start, vpipe, wait_for_line, wait_until_gone
from tests.end_to_end.test_train import only_run, tiny  # noqa: F401 (a fixture)
from tests.waiting import TIMEOUT
from vpipe import checkpoint
from vpipe.observe.diagnosis import diagnose
from vpipe.observe.hang import rank_states

KEYS = {
    "schedule": "1f1b",
    "minibatches": 2,
    "max_updates": 24,
    "dropout": 0.1,
    "clip_norm": 1.0,
    "deterministic": True,
    "heartbeat_limit": 600,
}


def final(run: Path) -> checkpoint.Manifest:
    return checkpoint.verify(run / "checkpoints" / "step-00000024")


def test_signals_save_and_end_a_run_that_then_goes_on_to_the_bit(
    tiny: Callable[..., Path],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tiny(**KEYS)
    # In the middle of an update, until the signals have been heard.
    monkeypatch.setenv("VPIPE_FAULT", "rank=1,step=9,point=step,kind=stop")
    process = start("train", "run.yml", cwd=folder, new=False)
    try:
        wait_for_line("VPIPE_FAULT: stop", folder, rank=1)
        stopped = rank_process(1, folder)
        assert stopped is not None
        for number in (signal.SIGUSR1, signal.SIGTERM):
            os.kill(process.pid, number)
            wait_for_line(f"{number.name}: ", folder)
        os.kill(stopped, signal.SIGCONT)
        out, err = process.communicate(TIMEOUT)
    finally:
        end(process)
    assert process.returncode == 75, out + err
    assert "Traceback" not in out + err
    wait_until_gone(str(folder))
    ended = only_run(folder)
    *_, saved = checkpoint.checkpoints(ended / "checkpoints")
    made = checkpoint.verify(saved).updates
    assert 9 <= made < 24
    assert (
        f"the run was stopped by you (a signal or a program asked it to end): it has made {made} of 24 updates"
        in out
    )
    summary = json.loads((ended / "summary.json").read_text())
    assert (summary["ended"], summary["updates"], summary["evaluation_loss"]) == (
        "stopped by you",
        made,
        None,
    )
    assert len(summary["losses"]) == made
    trace = json.loads((ended / "trace.json").read_text())["traceEvents"]
    assert {entry["tid"] for entry in trace if "dur" in entry} == {0, 1}
    assert f'"updates":{made}' in (ended / "report.html").read_text()
    standstill = next(finding for finding in diagnose(ended) if finding.topic == "standstill")
    assert standstill.grade == "fine"
    assert f"the run was stopped by you after {made} of 24 updates" in standstill.text
    assert "rank 1 was stopped by you" in "; ".join(map(str, rank_states(ended)))
    monkeypatch.delenv("VPIPE_FAULT")

    again = vpipe("train", "run.yml", "--resume", "auto", cwd=folder)
    assert again.code == 0, again.said
    assert f"resumed from {saved} after {made} updates" in again.out
    (second,) = [run for run in (folder / "runs").iterdir() if (run / "config.yml").exists() and run != ended]

    whole = vpipe("train", "run.yml", "--set", "log_directory=whole", cwd=folder)
    assert whole.code == 0, whole.said
    # Every weight and every momentum, and the place in the data: two runs with one seed are equal to the bit.
    assert final(second).files == final(only_run(folder, "whole")).files
    assert final(second).extra == final(only_run(folder, "whole")).extra


def test_a_run_that_is_ended_at_once_was_stopped_by_you(
    tiny: Callable[..., Path],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tiny(**KEYS)
    monkeypatch.setenv("VPIPE_FAULT", "rank=1,step=9,point=step,kind=stop")
    process = start("train", "run.yml", cwd=folder, new=False)
    try:
        wait_for_line("VPIPE_FAULT: stop", folder, rank=1)
        os.kill(process.pid, signal.SIGINT)
        wait_for_line("SIGTERM: ", folder)
        while process.returncode is None:  # two within a second count as one
            os.kill(process.pid, signal.SIGINT)
            time.sleep(0.2)
        out, err = process.communicate(TIMEOUT)
    finally:
        end(process)
    assert process.returncode == 128 + signal.SIGINT, out + err
    assert "the run was stopped by you, at once: updates after its newest checkpoint are lost" in err
    wait_until_gone(str(folder))
    run = only_run(folder)
    assert json.loads((run / "summary.json").read_text())["ended"] == "stopped by you"
    grades = {finding.topic: finding.grade for finding in diagnose(run)}
    assert grades["standstill"] == "fine"


def test_a_run_that_fails_leaves_its_results_too(
    tiny: Callable[..., Path],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tiny(**KEYS)
    monkeypatch.setenv("VPIPE_FAULT", "rank=1,step=9,point=bwd,kind=raise")
    ended = vpipe("train", "run.yml", cwd=folder)
    assert ended.code == 1, ended.said
    run = only_run(folder)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["ended"] == "failed"
    assert summary["error"].startswith("rank 1 failed: RuntimeError")
    assert summary["updates"] >= 1
    assert (run / "report.html").exists()
    json.loads((run / "trace.json").read_text())
    (standstill,) = [finding for finding in diagnose(run) if finding.topic == "standstill"]
    assert standstill.grade == "fault"
    assert standstill.figures["culprit"] == 1
