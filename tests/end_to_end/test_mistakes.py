"""Mistakes through the real command line: one line, exit code 2, no traceback, no process left."""

import ctypes
import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.announced import besides_announcements
from tests.end_to_end.command import end, rank_process, start, vpipe, wait_for_line, wait_until_gone
from tests.end_to_end.tiny import POEM, TINY
from tests.waiting import TIMEOUT


@pytest.fixture
def mistaken(tmp_path: Path) -> Callable[..., str]:
    """Run `vpipe train` with these keys; check how it ends; return the one line that it says."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "poem.txt").write_text(POEM * 100)

    def run(*arguments: object, prepare: Callable[[], None] | None = None, **keys: Any) -> str:
        (tmp_path / "run.yml").write_text(yaml.safe_dump(TINY | {"max_updates": 2} | keys))
        ended = vpipe("train", *(arguments or ["run.yml"]), cwd=tmp_path, prepare=prepare)
        assert ended.code == 2, ended.said
        assert "Traceback" not in ended.said
        (line,) = besides_announcements(ended.err)
        assert line.startswith("error: ")
        wait_until_gone(str(tmp_path))
        return line

    return run


# Found before any rank starts.


def test_missing_file(mistaken: Callable[..., str]) -> None:
    assert "nowhere.yml: cannot be read: No such file" in mistaken("nowhere.yml")


def test_unknown_key(mistaken: Callable[..., str]) -> None:
    assert "unknown key 'bach_size' (its value is 3): did you mean 'batch_size'?" in mistaken(bach_size=3)


def test_wrong_type(mistaken: Callable[..., str]) -> None:
    assert "batch_size is 'many': expected a whole number" in mistaken(batch_size="many")


def test_setting_without_a_value(mistaken: Callable[..., str]) -> None:
    assert "--set batch_size: write key=value" in mistaken("run.yml", "--set", "batch_size")


def test_machines_and_partition_disagree(mistaken: Callable[..., str]) -> None:
    line = mistaken(partition=[2, 2, 1])
    assert "partition" in line
    assert "machines" in line


def test_a_host_that_nobody_knows(mistaken: Callable[..., str]) -> None:
    line = mistaken(machines=["localhost:0", "elsewhere.invalid:0"])
    assert "elsewhere.invalid: its name is not known here" in line or "ssh is not installed here" in line


def test_port_taken(mistaken: Callable[..., str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port is {port}: it cannot be used" in mistaken(port=port)


def test_no_folder_can_be_made(mistaken: Callable[..., str]) -> None:
    assert "log_directory is 'run.yml/runs': no folder can be made there" in mistaken(
        log_directory="run.yml/runs"
    )


def renounce() -> None:
    """Root may write anywhere, by a capability: this process gives up all that it has."""
    version, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset(version, none) == 0


def test_no_write_permission(mistaken: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    assert "log_directory is 'locked/runs'" in mistaken(prepare=renounce, log_directory="locked/runs")


def test_missing_container(mistaken: Callable[..., str], tmp_path: Path) -> None:
    assert "container is 'image.sif'" in mistaken(container="image.sif")
    assert not (tmp_path / "runs").exists()


def test_a_key_that_is_planned(mistaken: Callable[..., str], tmp_path: Path) -> None:
    line = mistaken(partition="auto", replicas=[1, 1])
    assert "replicas is [1, 1], but partition is 'auto', which plans it" in line
    assert not (tmp_path / "runs").exists()


def test_missing_text(mistaken: Callable[..., str]) -> None:
    assert "data_dir is" in mistaken(data_dir="nowhere")


# Found by the ranks.


def test_empty_text(mistaken: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    assert "data_dir is" in mistaken(data_dir="empty.txt")


def test_binary_text(mistaken: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "binary.txt").write_bytes(os.urandom(1000) + b"\0")
    assert "binary.txt" in mistaken(data_dir="binary.txt")


def test_more_stages_than_blocks(mistaken: Callable[..., str]) -> None:
    machines = [f"localhost:{number}" for number in range(6)]
    assert "6 stages, but the model has only 5 blocks" in mistaken(machines=machines)


def test_weights_without_room(mistaken: Callable[..., str], tmp_path: Path) -> None:
    """What a rank runs out of while it makes its stages had ended in a traceback."""
    settings = {"model_type": "gpt2", "vocab_size": 2**48, "n_embd": 32, "n_layer": 2, "n_head": 2}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    own = {"model": "config.json", "synthetic_data": True, "stages": 2, "sequence_length": 16}
    (tmp_path / "own.yml").write_text(yaml.safe_dump(own))
    line = mistaken("own.yml")
    assert "out of memory: it tried to allocate" in line
    assert "own.yml --memory BYTES -o fits.json` " in line


def test_nothing_to_resume_from(mistaken: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    assert "there is no good checkpoint" in mistaken("run.yml", "--resume", "other")


def test_nothing_to_evaluate(tmp_path: Path) -> None:
    (tmp_path / "run.yml").write_text(yaml.safe_dump(TINY | {"data_dir": None, "synthetic_data": True}))
    ended = vpipe("eval", "run.yml", cwd=tmp_path)
    assert ended.code == 2, ended.said
    assert "there is no checkpoint to evaluate" in ended.err


# Faults.


@pytest.fixture
def endless(tmp_path: Path) -> None:
    """A run that would go on for long."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "poem.txt").write_text(POEM * 100)
    (tmp_path / "run.yml").write_text(yaml.safe_dump(TINY | {"epochs": 100_000}))


def test_a_killed_rank_ends_the_run(endless: None, tmp_path: Path) -> None:
    process = start("train", "run.yml", cwd=tmp_path, new=False)
    try:
        wait_for_line("Iteration", tmp_path)
        victim = rank_process(1, tmp_path)
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        _, err = process.communicate(TIMEOUT)
    finally:
        end(process)
    assert process.returncode == 1
    assert "rank 1 failed: killed by SIGKILL (stage 1, its last action was 1" in err
    wait_until_gone(str(tmp_path))


@pytest.mark.parametrize(
    ("number", "new"),
    [
        (signal.SIGINT, False),
        (signal.SIGKILL, False),
        pytest.param(signal.SIGKILL, True, marks=pytest.mark.long),
    ],
)
def test_no_rank_outlives_the_launcher(number: int, new: bool, endless: None, tmp_path: Path) -> None:
    process = start("train", "run.yml", cwd=tmp_path, new=new)
    try:
        wait_for_line("Iteration", tmp_path)
        assert rank_process(0, tmp_path) is not None
        os.kill(process.pid, number)
        process.communicate(TIMEOUT)
        wait_until_gone(str(tmp_path))
    finally:
        end(process)
