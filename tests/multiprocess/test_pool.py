"""The pool itself: ranks, failures, workers that hang or die, and nothing left of them."""

import os
import signal
import subprocess
import time
from multiprocessing import connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.multiprocess import pool as pools
from tests.multiprocess.pool import Pool, TaskFailedError
from tests.waiting import wait_until


def _place() -> tuple[str, str, str, int, int]:
    return (
        os.environ["RANK"],
        os.environ["WORLD_SIZE"],
        os.environ["MASTER_PORT"],
        os.getpid(),
        os.getpgid(0),
    )


def _fail_on(rank: int) -> int:
    if int(os.environ["RANK"]) == rank:
        raise KeyError(f"rank {rank} fails on purpose")
    return rank


def _hang_with_child(notes: Path) -> None:
    """The second rank; the first one answers when the notes are there."""
    if os.environ["RANK"] == "1":
        child = subprocess.Popen(["sleep", "300"])
        notes.with_suffix(".new").write_text(f"{os.getpid()} {child.pid}")
        notes.with_suffix(".new").rename(notes)
        time.sleep(300)
    wait_until(notes.exists, "the notes")


def _die_on(rank: int) -> str:
    if int(os.environ["RANK"]) == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return "lives"


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


def test_ranks_have_an_environment_and_a_process_group_each(pool: Pool) -> None:
    places = pool.run(3, _place)
    assert [place[:2] for place in places] == [("0", "3"), ("1", "3"), ("2", "3")]
    assert len({place[2] for place in places}) == 1
    assert len({place[3] for place in places}) == 3
    assert all(pid == group for *_, pid, group in places)


def test_workers_are_used_again(pool: Pool) -> None:
    assert [place[3] for place in pool.run(2, _place)] == [place[3] for place in pool.run(2, _place)]


def test_a_failure_is_told_with_its_class_and_text(pool: Pool) -> None:
    good, bad = pool.outcomes(2, _fail_on, 1)
    assert (good.value, good.error) == (1, None)
    assert (bad.error, bad.text) == ("KeyError", "'rank 1 fails on purpose'")
    with pytest.raises(TaskFailedError, match="rank 1: KeyError: 'rank 1 fails on purpose'"):
        pool.run(2, _fail_on, 1)


def test_a_worker_that_hangs_is_killed_with_its_children_and_replaced(
    own_pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tmp_path / "pids"
    before = [place[3] for place in own_pool.run(2, _place)]
    now = 0.0

    def wait(pending: list[Any], timeout: float) -> list[Any]:
        """The time is over when the first of them has answered."""
        nonlocal now
        ready = connection.wait(pending, None if now == 0 else 0)
        now = 3.0
        return ready

    with monkeypatch.context() as patch:
        patch.setattr(pools, "wait", wait)
        patch.setattr(pools, "time", SimpleNamespace(monotonic=lambda: now))
        quick, hung = own_pool.outcomes(2, _hang_with_child, notes, timeout=2)
    assert (quick.error, hung.error, hung.text) == (None, "Hung", "no answer within 2 s")
    pids = [int(pid) for pid in notes.read_text().split()]
    wait_until(lambda: not any(map(_is_running, pids)), "their end")
    after = [place[3] for place in own_pool.run(2, _place)]
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_a_worker_that_dies_is_replaced(own_pool: Pool) -> None:
    dead, alive = own_pool.outcomes(2, _die_on, 0)
    assert (dead.error, alive.value) == ("Killed", "lives")
    assert own_pool.run(2, _fail_on, 5) == [5, 5]
