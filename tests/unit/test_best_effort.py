"""Writing beside the training: what fails is counted and reported once, and nothing is raised."""

import errno
import io
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from vpipe.errors import NotWrittenError
from vpipe.launch.watch import FailedRank, FailureLog
from vpipe.observe.figures import MetricsWriter
from vpipe.system import best_effort
from vpipe.system.best_effort import BestEffort, LogFile
from vpipe.system.files import json_text, read_tail, replace_text, write_json


@pytest.fixture
def warned() -> list[str]:
    return []


@pytest.fixture
def effort(warned: list[str]) -> BestEffort:
    return BestEffort(warned.append)


def refuse(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_the_first_failure_is_reported_and_all_are_counted(effort: BestEffort, warned: list[str]) -> None:
    for number in range(3):
        with effort.writing(f"file {number}"):
            refuse()
    with effort.writing("file 3"):
        raise NotWrittenError("report.html: cannot be written: Is a directory")
    assert effort.failed == 4
    (line,) = warned
    assert line.startswith("WARNING: file 0: cannot be written: No space left on device: the run goes on")
    with pytest.raises(ZeroDivisionError), effort.writing("file 4"):
        _ = 1 / 0


def test_a_warning_that_cannot_be_written_either_ends_nothing(tmp_path: Path) -> None:
    """The warning goes into the log that has failed."""
    effort = BestEffort(lambda line: log.line(line))
    log = LogFile(tmp_path / "missing" / "log", effort)
    log.line("one")
    assert effort.failed == 2
    assert log.descriptor is None


def test_lines_come_back_with_the_folder(tmp_path: Path, effort: BestEffort) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    log = LogFile(folder / "log", effort)
    log.line("one")
    shutil.rmtree(folder)
    log.line("two")
    folder.mkdir()
    log.line("three")
    assert (folder / "log").read_text() == "three\n"
    assert effort.failed == 1
    log.close()
    log.line("four")  # of a thread that is late
    log.close()


def test_a_line_is_written_as_a_whole_or_not_at_all(
    tmp_path: Path, effort: BestEffort, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = LogFile(tmp_path / "log", effort)
    log.line("one")
    write = os.write
    room = [5, 0]

    def little_room(file: int, data: bytes) -> int:
        left = room.pop(0)
        return write(file, data[:left]) if left else refuse()

    with monkeypatch.context() as full:
        full.setattr(best_effort.os, "write", little_room)
        log.line("a longer line")
    log.line("three")
    assert (tmp_path / "log").read_text() == "one\nthree\n"
    assert effort.failed == 1


def test_threads_share_a_log(tmp_path: Path, effort: BestEffort) -> None:
    log = LogFile(tmp_path / "log", effort)
    threads = [threading.Thread(target=lambda: [log.line("x" * 50) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "log").read_text() == ("x" * 50 + "\n") * 200


def test_metrics_and_tensorboard_go_on_without_their_folder(
    tmp_path: Path, effort: BestEffort, warned: list[str]
) -> None:
    metrics = MetricsWriter(tmp_path / "run", effort)  # which nobody has made
    metrics.write("train", 1, loss=math.nan)
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    for update in range(2, 40):
        metrics.write("train", update, loss=2.0)
    metrics.close()
    assert effort.failed >= 38
    assert len(warned) == 1


def test_tensorboard_reads_what_was_written_around_a_full_disk(
    tmp_path: Path, effort: BestEffort, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = MetricsWriter(tmp_path, effort)
    for update in range(1, 4):
        with monkeypatch.context() as full:
            if update == 2:
                full.setattr(best_effort.os, "write", refuse)
            metrics.write(
                "train", update, loss=update / 2, ranks=[{"rank": 0, "stages": [0], "bubble_share": 0.5}]
            )
    metrics.close()
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in board.Scalars("train/loss")] == [(1, 0.5), (3, 1.5)]
    assert [event.step for event in board.Scalars("rank 0, stage 0/bubble_share")] == [1, 3]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["update"] for line in lines] == [1, 3]
    assert effort.failed == 2


def test_the_launcher_goes_on_without_its_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = FailureLog(tmp_path / "missing")
    for attempt in range(3):
        log.failed(attempt, FailedRank(0, "killed"), log.now())
        log.recovered(attempt + 1)
    assert log.effort.failed == 6
    assert capsys.readouterr().err.count("WARNING") == 1


def test_the_journal_keeps_its_time_when_the_clock_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = FailureLog(tmp_path)
    real = time.time
    log.failed(0, FailedRank(0, "killed"), log.now())
    monkeypatch.setattr(time, "time", lambda: real() - 86_400)
    log.recovered(1)
    failed, recovered = map(json.loads, (tmp_path / "failures.jsonl").read_text().splitlines())
    assert 0 <= recovered["recovered"] - failed["found"] < 3600
    assert " s after the fault" in capsys.readouterr().err


# Whole files


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "summary.json"
    replace_text(file, "before")
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(NotWrittenError, match=r"summary\.json: cannot be written: No space left on device"):
        replace_text(file, "after")
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    assert file.read_text() == "before"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_json_has_no_numbers_that_are_not_finite(tmp_path: Path, bad: float) -> None:
    value = {"loss": bad, "losses": [(0, 1.0), (1, bad)], "ranks": [{"rank": 0, "of": {"it": bad}}]}
    read = {"loss": None, "losses": [[0, 1.0], [1, None]], "ranks": [{"rank": 0, "of": {"it": None}}]}
    assert json.loads(json_text(value), parse_constant=pytest.fail) == read
    write_json(tmp_path / "summary.json", value)
    assert json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail) == read


def test_the_end_of_a_long_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "log"
    assert read_tail(file) == ""
    file.write_text("0123456789")
    assert read_tail(file) == "0123456789"
    assert read_tail(file, 7) == "789"
    monkeypatch.setattr("vpipe.system.files.TAIL", 4)
    assert read_tail(file) == read_tail(file, 2) == "6789"


# Standard output

PRINTS = """
import sys
from vpipe.system.best_effort import open_closed_streams, survive_lost_output
open_closed_streams()
survive_lost_output()
for number in range(20000):
    print(number)
print("to the end", file=sys.stderr)
"""


def printing(before: str = "", after: str = "") -> subprocess.CompletedProcess[str]:
    command = f"{before} {sys.executable} -c '{PRINTS}' {after}"
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=200, check=False
    )


@pytest.mark.parametrize("after", ["| head -1", "> /dev/full", ">&-", "2>&-", ">&- 2>&- <&-"])
def test_a_process_survives_the_loss_of_its_output(after: str) -> None:
    ended = printing(after=after)
    assert ended.returncode == 0, ended.stderr
    if "2>&-" not in after:
        *warnings, last = ended.stderr.splitlines()
        assert last == "to the end"
        assert len(warnings) == (after != ">&-")
    if after == "2>&-":
        assert ended.stdout.splitlines() == list(map(str, range(20000)))


def test_output_that_is_captured_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = io.StringIO()
    monkeypatch.setattr(sys, "stdout", captured)
    monkeypatch.setattr(sys, "stderr", captured)
    best_effort.survive_lost_output()
    assert sys.stdout is captured
