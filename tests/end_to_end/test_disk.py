"""A disk that is full, a folder that is deleted or made read-only, a reader that goes away: the training goes on, and
what must not be lost is reported in the end.
"""

import ctypes
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.command import end, rank_process, start, vpipe, wait_until_gone
from tests.end_to_end.test_train import tiny  # noqa: F401 (a fixture)
from tests.waiting import TIMEOUT, wait_until
from vpipe import checkpoint

KEYS: dict[str, Any] = {
    "synthetic_data": True,
    "data_dir": None,
    "schedule": "1f1b",
    "minibatches": 2,
    "max_updates": 12,
    "max_samples": 128,
    "evaluation_samples": 4,
    "heartbeat_limit": 600,
    "print_frequency": 1,
}
LOST = "the run goes on without it"


def strict(text: str) -> Any:
    """As a parser reads it that keeps to the standard."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """The log directory `runs` is a disk of its own."""
    disk = tmp_path / "runs"
    disk.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(disk)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip(f"a file system cannot be mounted here: {made.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(disk: Path) -> Path:
    """Until nothing can be written any more; to be deleted to make room."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return filler


def obey_permissions() -> None:
    """The superuser may write anywhere: take that away from this process (CAP_DAC_OVERRIDE)."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable, and once more for the higher ones
    if libc.capget(header, sets) == 0:
        for each in range(3):
            sets[each] &= ~(1 << 1)
        libc.capset(header, sets)


class Midway:
    """A run that stands still in the middle of an update until it gets SIGCONT."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **forked: Any) -> None:
        monkeypatch.setenv("VPIPE_FAULT", "rank=1,step=6,point=step,kind=stop")
        self.folder = folder
        self.process = start("train", "run.yml", cwd=folder, new=False, **forked)
        self.stopped = wait_until(self._find, "a stopped rank")

    def _find(self) -> int | None:
        rank = rank_process(1, self.folder)
        try:
            stat = Path(f"/proc/{rank}/stat").read_text() if rank else ""
        except OSError:
            return None
        return rank if stat.rpartition(")")[2].split()[:1] == ["T"] else None

    @property
    def run(self) -> Path:
        (found,) = [
            path for path in (self.folder / "runs").iterdir() if path.is_dir() and path.name != "cache"
        ]
        return found

    def go_on(self) -> tuple[int, str, str]:
        os.kill(self.stopped, signal.SIGCONT)
        out, err = self.process.communicate(TIMEOUT)
        assert self.process.returncode is not None
        return self.process.returncode, out, err


@pytest.fixture
def midway(
    tiny: Callable[..., Path],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[..., Midway]]:
    begun: list[Midway] = []

    def begin(keys: dict[str, Any] | None = None, **forked: Any) -> Midway:
        begun.append(Midway(tiny(**KEYS | (keys or {})), monkeypatch, **forked))
        return begun[0]

    yield begin
    for each in begun:
        end(each.process)
        wait_until_gone(str(each.folder))


def test_a_full_disk_costs_what_is_written_beside_the_training(
    small_disk: Path, midway: Callable[..., Midway]
) -> None:
    filler = fill(small_disk)
    begun = midway({"checkpoint_interval": 3})
    filler.unlink()
    code, out, err = begun.go_on()
    assert code == 0, out + err
    assert out.count(LOST) == 1, out
    assert "No space left on device" in out
    assert "WARNING: checkpoint" in out
    summary = strict((begun.run / "summary.json").read_text())
    assert summary["lost_writes"] > 5
    assert "No space left on device" in summary["first_lost_write"]
    assert "writes failed" in out
    lines = [strict(line) for line in (begun.run / "metrics.jsonl").read_text().splitlines()]
    assert {line["update"] for line in lines if line["kind"] == "train"} >= {10, 11, 12}
    for name in ("trace.json", "status.0.json", "events.0.json"):
        strict((begun.run / name).read_text())
    assert checkpoint.verify(begun.run / "checkpoints" / "step-00000012").updates == 12


def test_on_a_disk_that_stays_full_the_end_is_loud(
    small_disk: Path,
    tiny: Callable[..., Path],  # noqa: F811
) -> None:
    fill(small_disk)
    ended = vpipe("train", "run.yml", cwd=tiny(**KEYS))
    assert ended.code == 74, ended.said
    assert "Iteration 12, Loss: " in ended.out, "it has trained to its end"
    (line,) = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    assert "step-00000012 was not saved" in line
    assert "No space left on device" in line
    assert "Traceback" not in ended.said


def test_a_run_goes_on_when_its_folder_is_deleted(midway: Callable[..., Midway]) -> None:
    begun = midway()
    shutil.rmtree(begun.run)
    code, out, err = begun.go_on()
    assert code == 0, out + err
    assert "Traceback" not in out + err
    assert strict((begun.run / "summary.json").read_text())["updates"] == 12
    assert checkpoint.verify(begun.run / "checkpoints" / "step-00000012").updates == 12
    assert (begun.run / "model").is_dir()


@pytest.mark.parametrize("until_the_end", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_run_goes_on_when_its_folder_is_read_only(
    midway: Callable[..., Midway], until_the_end: bool
) -> None:
    begun = midway({"checkpoint_interval": 7}, prepare=obey_permissions)
    begun.run.chmod(0o555)
    try:
        if not until_the_end:
            os.kill(begun.stopped, signal.SIGCONT)
            wait_until(
                lambda: "step-00000007 was not saved" in (begun.run / "output.log.1").read_text(),
                "a failed save",
            )
            begun.run.chmod(0o755)
        code, out, err = begun.go_on()
    finally:
        begun.run.chmod(0o755)
    assert code == (74 if until_the_end else 0), out + err
    assert "Permission denied" in out
    assert "Traceback" not in out + err
    assert (begun.run / "summary.json").exists() != until_the_end


def test_a_run_goes_on_when_nobody_reads_what_it_prints(tiny: Callable[..., Path]) -> None:  # noqa: F811
    folder = tiny(**KEYS)
    process = start("train", "run.yml", cwd=folder, new=False, prepare=close_output)
    try:
        out, err = process.communicate(TIMEOUT)
    finally:
        end(process)
    assert process.returncode == 0, out + err
    (run,) = (path for path in (folder / "runs").iterdir() if (path / "summary.json").exists())
    log = (run / "output.log.0").read_text()
    assert log.count("standard output: cannot be written: Broken pipe") == 1
    assert "Iteration 12, Loss: " in log


def close_output() -> None:
    """Standard output becomes a pipe that nobody reads, once the command has its own."""
    from tests.end_to_end import forked

    reading, writing = os.pipe()
    os.close(reading)
    begin = forked._begin

    def without_reader(*arguments: Any) -> None:
        forked._begin = begin  # the ranks inherit it
        os.dup2(writing, 1)
        begin(*arguments)

    forked._begin = without_reader
