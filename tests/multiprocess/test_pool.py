"""The pool itself: ranks, failures, workers that hang or die, and nothing left of them."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.multiprocess.pool import Pool, TaskFailedError

pytestmark = pytest.mark.timeout(60)


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
        raise KeyError(f"rank {rank} was told to")
    return rank


def _hang_with_child(path: str) -> None:
    if os.environ["RANK"] == "1":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
        with open(path, "w") as file:
            file.write(f"{os.getpid()} {child.pid}")
        time.sleep(100)


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
    assert (bad.error, bad.text) == ("KeyError", "'rank 1 was told to'")
    with pytest.raises(TaskFailedError, match="rank 1: KeyError: 'rank 1 was told to'"):
        pool.run(2, _fail_on, 1)


def test_a_worker_that_hangs_is_killed_with_its_children_and_replaced(pool: Pool, tmp_path: object) -> None:
    notes = f"{tmp_path}/pids"
    before = [place[3] for place in pool.run(2, _place)]
    quick, hung = pool.outcomes(2, _hang_with_child, notes, timeout=2)
    assert (quick.error, hung.error, hung.text) == (None, "Hung", "no answer within 2 s")
    with open(notes) as file:
        pids = [int(pid) for pid in file.read().split()]
    deadline = time.monotonic() + 5
    while any(map(_is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(_is_running, pids))
    after = [place[3] for place in pool.run(2, _place)]
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_a_worker_that_dies_is_replaced(pool: Pool) -> None:
    started = time.monotonic()
    dead, alive = pool.outcomes(2, _die_on, 0)
    assert (dead.error, alive.value) == ("Killed", "lives")
    assert pool.run(2, _fail_on, 5) == [5, 5]
    assert time.monotonic() - started < 10
