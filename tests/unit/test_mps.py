"""A daemon of MPS that does not quit, and its guard; a shell script stands in for NVIDIA's program."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.command import alive, wait_until_gone
from tests.waiting import wait_until
from vpipe.launch import helpers, mps

Install = Callable[[str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a shell script in the daemon's place; temporary files go into the test's own folder."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

    def write(script: str) -> None:
        program = tmp_path / mps.CONTROL
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    return write


@pytest.fixture
def stubborn(install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon whose server goes on after "quit", and that never answers."""
    server = tmp_path / "nvidia-cuda-mps-server"
    shutil.copy("/bin/sleep", server)
    install(f'if [ "$1" = -d ]; then setsid {server} 600 & else {server} 600; fi')
    monkeypatch.setattr(mps, "QUIT_LIMIT", 0)
    monkeypatch.setattr(mps, "KILL_LIMIT", 0.2)
    monkeypatch.setattr(helpers, "END_LIMIT", 0.2)


def guard_process(folder: Path) -> int:
    """The process that has the guard's code on its command line."""
    (found,) = [
        int(process)
        for process in alive(str(folder))
        if b"import guard" in Path("/proc", process, "cmdline").read_bytes()
    ]
    return found


@pytest.mark.usefixtures("stubborn")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_guard_that_is_gone_or_stopped_leaves_no_daemon(number: signal.Signals, tmp_path: Path) -> None:
    with mps.sharing([0, 0]):
        os.kill(guard_process(tmp_path), number)
    wait_until_gone(str(tmp_path))
    assert not list(tmp_path.glob("vpipe-mps-*"))


@pytest.mark.usefixtures("stubborn")
def test_the_guard_kills_a_daemon_that_does_not_quit(tmp_path: Path) -> None:
    folder = tmp_path / "vpipe-mps-x"
    folder.mkdir()
    code = "import sys; from vpipe.launch import mps; mps.QUIT_LIMIT = mps.KILL_LIMIT = 0.2; mps.guard(sys.argv[1])"
    repository = str(Path(__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": repository},
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == mps.READY
        process.send_signal(signal.SIGTERM)  # only the launcher's end ends it
        wait_until(lambda: alive(str(tmp_path)))
        process.stdin.close()
        process.wait(60)
    assert process.returncode == 0
    wait_until_gone(str(tmp_path))
    assert not folder.exists()


def test_a_guard_that_stands_still_at_the_start_is_reported(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("exec sleep 600")
    monkeypatch.setattr(mps, "START_LIMIT", 0.2)
    monkeypatch.setattr(helpers, "END_LIMIT", 0.2)
    monkeypatch.setattr(mps, "KILL_LIMIT", 0.2)
    with pytest.raises(mps.VPipeError, match="did not start"), mps.sharing([0, 0]):
        pass
    wait_until_gone(str(tmp_path))
