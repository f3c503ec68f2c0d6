"""The launcher finds the rank that failed first, tells everybody, and leaves nothing behind.

The ranks are stand-ins that start in a moment (`stand_in.py`); `test_restart.py` does it with real ones.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.command import alive
from vpipe.errors import RankFailedError, VPipeError
from vpipe.launch import local
from vpipe.launch.local import Ranks, run_ranks_here

pytestmark = pytest.mark.timeout(60)
STAND_IN = (sys.executable, str(Path(__file__).with_name("stand_in.py")))
REPOSITORY = Path(__file__).parents[2]
Supervised = Callable[..., tuple[str, float, list[str]]]


@pytest.fixture
def supervised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Supervised:
    """Run stand-ins that behave like this; what the launcher raises, the seconds from the fault until all are gone,
    and the ranks' logs."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))

    def run(
        *behaviour: str, error: type[VPipeError] = RankFailedError, limit: float = 2.0
    ) -> tuple[str, float, list[str]]:
        ranks = Ranks(
            behaviour,
            len(behaviour),
            tmp_path,
            [f"stage {rank}" for rank in range(len(behaviour))],
            interpreter=STAND_IN,
            quiet=True,
            heartbeat_limit=limit,
            patience=60,
        )
        before = children_of(os.getpid())
        with pytest.raises(error) as caught:
            run_ranks_here(ranks)
        ended = time.time()
        assert not alive(str(tmp_path))
        assert children_of(os.getpid()) == before
        logs = [(tmp_path / f"output.log.{rank}").read_text() for rank in range(len(behaviour))]
        struck = re.search(r"VPIPE_FAULT: \w+ at fwd, ([0-9.]+)", "".join(logs))
        return str(caught.value), ended - float(struck[1]) if struck else 0.0, logs

    return run


def children_of(process: int) -> list[str]:
    return Path(f"/proc/{process}/task/{process}/children").read_text().split()


ENDS = {
    "kill": "killed by SIGKILL",
    "segv": "killed by SIGSEGV",
    "exit": "ended with exit code 70",
    "raise": "RuntimeError: VPIPE_FAULT asked for this at fwd",
}


@pytest.mark.parametrize(
    ("kind", "victim"), [("kill", 0), ("kill", 2), ("segv", 1), ("exit", 0), ("raise", 2)]
)
def test_every_log_names_the_rank_that_ended(kind: str, victim: int, supervised: Supervised) -> None:
    behaviour = ["follow:0.2", "wait", "follow:0.2"]  # those who follow say at first that another one was it
    behaviour[victim] = f"{kind}:0.3"
    text, seconds, logs = supervised(*behaviour)
    verdict = f"rank {victim} failed: {ENDS[kind]} (stage {victim}, its last action was {victim}F3)"
    assert text.startswith(verdict)
    for rank in {0, 1, 2} - {victim}:
        assert logs[rank].count(f"error: stopped because {verdict}\n") == 1
        assert "rank 7" not in logs[rank]
    assert seconds < 5


def test_a_traceback_comes_once_and_first(supervised: Supervised) -> None:
    text, _, logs = supervised("wait", "raise:0.2")
    assert text.count("Traceback") == 1
    assert logs[1].splitlines()[1].startswith("Traceback")  # behind the line of the fault itself
    assert "Traceback" not in logs[0]


def test_a_mistake_is_told_as_it_was_said_and_is_no_fault(supervised: Supervised) -> None:
    text, _, logs = supervised("mistake", "follow:0.1", error=VPipeError)
    assert text == "batch_size is 0: expected at least 1, such as\nbatch_size: 8"
    assert "stopped because rank 0 failed: batch_size is 0: expected at least 1, such as\n" in logs[1]
    assert "batch_size: 8" not in logs[1]


@pytest.mark.parametrize(
    ("kind", "how"), [("stop", "stopped (SIGSTOP)"), ("gil", "stuck: its interpreter has not run")]
)
def test_a_rank_that_stands_still_is_found(kind: str, how: str, supervised: Supervised) -> None:
    text, seconds, logs = supervised("wait", f"{kind}:0.1")
    assert text.startswith(f"rank 1 failed: {how}")
    assert "stopped because rank 1 failed" in logs[0]
    assert seconds < 2 + 5


def test_a_rank_that_is_stopped_while_it_imports_is_found(supervised: Supervised, tmp_path: Path) -> None:
    text, _, _ = supervised("deaf", "stop", limit=1.0)
    assert text.startswith("rank 1 failed: stopped")
    assert (
        "stopped because rank 1 failed" in (tmp_path / "output.log.0").read_text()
    )  # by the launcher's hand


def test_who_works_waits_or_imports_is_not_blamed(supervised: Supervised) -> None:
    text, _, logs = supervised("grind:3", "compute:3", "deaf", "kill:4", limit=1.0)
    assert text.startswith("rank 3 failed: killed by SIGKILL")
    assert "VPIPE_FAULT: kill" in logs[3]  # so it came to that


def test_what_a_rank_has_started_ends_with_it(supervised: Supervised) -> None:
    supervised("kill:1", "parent")


LAUNCHER = """
import sys
from pathlib import Path
from vpipe.launch.local import Ranks, run_ranks_here
folder, *interpreter = sys.argv[1:]
behaviour = ["parent", "wait", "gil:0.5"]
run_ranks_here(Ranks(behaviour, 3, Path(folder), ["stage"] * 3, interpreter=interpreter, quiet=True))
"""


def test_nothing_outlives_a_killed_launcher(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path), *STAND_IN]
    launcher = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(REPOSITORY)})
    try:
        deadline = time.monotonic() + 20
        while (
            len(alive(str(tmp_path))) < 6 and time.monotonic() < deadline
        ):  # launcher, keeper, 3, and a sleep
            time.sleep(0.1)
        assert len(alive(str(tmp_path))) == 6
    finally:
        os.kill(launcher.pid, signal.SIGKILL)
        launcher.wait()
    deadline = time.monotonic() + 5
    while alive(str(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(str(tmp_path))


def test_impatient_fingers_do_not_cut_a_save_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "AGAIN", 0.2)
    with local._heeding_signals() as asked:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
        assert asked.to_end == [signal.SIGINT]
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked.to_end == [signal.SIGINT, signal.SIGTERM]
