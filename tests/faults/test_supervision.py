"""The launcher finds the rank that failed first, reports it to all, and leaves nothing behind.

The ranks are stand-ins that start in a moment (`stand_in.py`); `test_restart.py` does it with real ones.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.end_to_end.command import alive, wait_until_gone
from tests.waiting import wait_until
from vpipe.errors import RankFailedError, VPipeError
from vpipe.launch import helpers, local, signals, watch
from vpipe.launch.local import Ranks, run_ranks_here
from vpipe.record.whereabouts import Page, Whereabouts
from vpipe.schedule import Action, Op

STAND_IN = (sys.executable, str(Path(__file__).with_name("stand_in.py")))
REPOSITORY = Path(__file__).parents[2]
NEVER = 600.0
"""Seconds: a limit that is not to end anything."""
FOUND = 5.0
"""Seconds after which a rank that stands still is found; no healthy one is kept from the processor for so long."""
Supervised = Callable[..., tuple[str, list[str]]]


@pytest.fixture
def supervised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Supervised:
    """Run stand-ins that behave like this; what the launcher raises, and the ranks' logs."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))

    def run(
        *behaviour: str,
        error: type[VPipeError] = RankFailedError,
        limit: float = NEVER,
        doubt: float = NEVER,
        grace: float = NEVER,
    ) -> tuple[str, list[str]]:
        monkeypatch.setattr(watch, "FOLLOWER_WAIT", doubt)
        monkeypatch.setattr(local, "GRACE", grace)
        ranks = Ranks(
            behaviour,
            len(behaviour),
            tmp_path,
            [f"stage {rank}" for rank in range(len(behaviour))],
            interpreter=STAND_IN,
            quiet=True,
            heartbeat_limit=limit,
            patience=NEVER,
        )
        before = children_of(os.getpid())
        with pytest.raises(error) as caught:
            run_ranks_here(ranks)
        assert children_of(os.getpid()) == before
        wait_until_gone(str(tmp_path))
        return str(caught.value), [
            (tmp_path / f"output.log.{rank}").read_text() for rank in range(len(behaviour))
        ]

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
    ("kind", "victim"),
    [
        ("kill", 0),
        ("raise", 2),
        *(pytest.param(*case, marks=pytest.mark.long) for case in [("kill", 2), ("segv", 1), ("exit", 0)]),
    ],
)
def test_every_log_names_the_rank_that_ended(kind: str, victim: int, supervised: Supervised) -> None:
    behaviour = ["follow", "wait", "follow"]  # those who follow say at first that another one was it
    behaviour[victim] = kind
    text, logs = supervised(*behaviour)
    verdict = f"rank {victim} failed: {ENDS[kind]} (stage {victim}, its last action was {victim}F3)"
    assert text.startswith(verdict)
    for rank in {0, 1, 2} - {victim}:
        assert logs[rank].count(f"error: stopped because {verdict}\n") == 1
        assert "rank 7" not in logs[rank]


def test_a_rank_that_lost_another_is_named_when_no_other_one_fails(supervised: Supervised) -> None:
    text, logs = supervised("wait", "follow:nobody", doubt=0.1)
    verdict = "rank 1 failed: rank 7 closed its connection: it ended or was killed"
    assert text.startswith(verdict)
    assert f"error: stopped because {verdict}\n" in logs[0]


def test_a_traceback_comes_once_and_first(supervised: Supervised) -> None:
    text, logs = supervised("wait", "raise")
    assert text.count("Traceback") == 1
    assert logs[1].splitlines()[1].startswith("Traceback")  # behind the line of the fault itself
    assert "Traceback" not in logs[0]


def test_a_mistake_is_reported_unchanged_and_is_no_fault(supervised: Supervised) -> None:
    text, logs = supervised("mistake", "follow", error=VPipeError)
    assert text == "batch_size is 0: expected at least 1, such as\nbatch_size: 8"
    assert "stopped because rank 0 failed: batch_size is 0: expected at least 1, such as\n" in logs[1]
    assert "batch_size: 8" not in logs[1]


@pytest.mark.long  # the short ones: one that is stopped while it imports, and a watch with a clock of its own
@pytest.mark.parametrize(
    ("kind", "how"), [("stop", "stopped (SIGSTOP)"), ("gil", "stuck: its interpreter has not run")]
)
def test_a_rank_that_stands_still_is_found(kind: str, how: str, supervised: Supervised) -> None:
    text, logs = supervised("wait", kind, limit=FOUND)
    assert text.startswith(f"rank 1 failed: {how}")
    assert "stopped because rank 1 failed" in logs[0]


def test_a_rank_that_is_stopped_while_it_imports_is_found(supervised: Supervised) -> None:
    text, logs = supervised("deaf", "stopped", limit=FOUND, grace=0.1)
    assert text.startswith("rank 1 failed: stopped (SIGSTOP)")
    assert "stopped because rank 1 failed" in logs[0]  # by the launcher's hand


def test_who_works_or_imports_is_not_blamed(supervised: Supervised) -> None:
    """The lock is held for longer than the limit. No rank waits that could be kept from its heartbeats for as long:
    the one that is killed computes, in Python, until then."""
    text, _ = supervised("grind:1.2", "deaf", "kill:0", limit=1.0, grace=0.1)
    assert text.startswith("rank 2 failed: killed by SIGKILL")


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[float, str] | None]:
    """The second after which the last of some ranks is blamed within a minute, and for what, by a clock of our own."""

    def run(state: str, heartbeats: bool, share: float, patience: float = NEVER) -> tuple[float, str] | None:
        """Its state, whether it sends heartbeats, and its share of a processor; the first one waits, and sends them."""
        now = 1000.0
        page = Page(bytearray(Page.size(2)))
        ranks = Ranks([], 2, tmp_path, ["stage 0", "stage 1"], heartbeat_limit=10.0, patience=patience)
        for rank in (0, 1):
            ranks.log(rank).touch()
        children: Any = {rank: SimpleNamespace(pid=rank, poll=lambda: None) for rank in (0, 1)}
        found = watch.LauncherWatch(children, page, ranks)
        monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: now))
        monkeypatch.setattr(page, "beat", lambda rank: now if heartbeats or rank == 0 else 1000.0)
        monkeypatch.setattr(watch, "state_of", lambda rank: state if rank else "S")
        used = {"main": 0.0, "worker": share} | {f"waits for the lock {n}": 0.01 for n in range(20)}
        monkeypatch.setattr(
            watch,
            "_ticks",
            lambda _: {thread: int(100 * part * (now - 1000)) for thread, part in used.items()},
        )
        for step in range(600):
            now = 1000 + step / 10
            failed = found.failed_rank()
            if failed is not None:
                assert failed.rank == 1
                return round(now - 1000), failed.how.partition(" (stage")[0]
        return None

    return run


def test_the_watch_blames_who_stands_still_and_nobody_who_works_or_waits(
    watched: Callable[..., tuple[float, str] | None],
) -> None:
    assert watched("S", heartbeats=True, share=0.0) is None  # it waits
    assert watched("R", heartbeats=False, share=0.0) is None  # it waits for a processor, and holds the lock
    assert watched("S", heartbeats=False, share=0.5) is None  # its threads are at work
    assert watched("S", heartbeats=False, share=0.0) == (9, "stuck: its interpreter has not run for 9.1 s")
    assert watched("T", heartbeats=False, share=0.0) == (5, "stopped (SIGSTOP) for 5.1 s")
    assert watched("R", heartbeats=False, share=1.0, patience=30.0) == (
        30,
        "stuck: its interpreter has not run for 30.1 s",
    )


@pytest.mark.parametrize("state", ["T", "S"])
def test_nobody_is_blamed_when_all_were_suspended(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 35 of docs/reliability.md: the ranks are stopped, then the launcher for a minute; it is continued first."""
    now, beat = 1000.0, 1000.0
    page = Page(bytearray(Page.size(1)))
    ranks = Ranks([], 1, tmp_path, ["stage 0"], heartbeat_limit=10.0, patience=30.0)
    ranks.log(0).touch()
    child: Any = SimpleNamespace(pid=0, poll=lambda: None)
    found = watch.LauncherWatch({0: child}, page, ranks)
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(page, "beat", lambda rank: beat)
    monkeypatch.setattr(watch, "state_of", lambda rank: state)
    monkeypatch.setattr(watch, "_ticks", lambda rank: {"main": 0})
    for _ in range(40):  # it has seen for 4 s that the rank stands still
        now += 0.1
        assert found.failed_rank() is None
    now += 60.0
    for _ in range(40):
        now += 0.1
        assert found.failed_rank() is None
    for _ in range(60):  # a rank that then does not go on is blamed
        now += 0.1
        failed = found.failed_rank()
        if failed is not None:
            assert 4.9 < float(failed.how.partition(" for ")[2].split()[0]) < 10.1
            return
    raise AssertionError("it was not found")


def test_training_that_is_over_before_the_next_look_is_noticed(tmp_path: Path) -> None:
    """Each rank's actions begin and end between two looks, and not at the same time; then all have ended."""
    page = Page(bytearray(Page.size(2)))
    ranks = Ranks([], 2, tmp_path, ["stage 0", "stage 1"])
    code: list[int | None] = [None]
    child: Any = SimpleNamespace(pid=os.getpid(), poll=lambda: code[0])
    noticed: list[bool] = []
    found = watch.LauncherWatch(dict.fromkeys((0, 1), child), page, ranks, lambda: noticed.append(True))
    for rank in (0, 1):
        place = Whereabouts(page, rank)
        place.say("the making of the pipeline")
        assert found.failed_rank() is None
        assert not noticed
        place.enter(Action(rank, Op.F, 3), 1.0)
        place.say("its end")
    code[0] = 0
    for _ in range(2):
        assert found.failed_rank() is None
        assert noticed == [True]


def test_what_a_rank_has_started_ends_with_it(supervised: Supervised) -> None:
    supervised("kill", "parent")


LAUNCHER = """
import sys
from pathlib import Path
from vpipe.launch.local import Ranks, run_ranks_here
folder, *interpreter = sys.argv[1:]
behaviour = ["parent", "wait", "gil"]
stages = ["stage"] * 3
run_ranks_here(Ranks(behaviour, 3, Path(folder), stages, interpreter=interpreter, quiet=True, heartbeat_limit=600))
"""


def test_nothing_outlives_a_killed_launcher(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path), *STAND_IN]
    launcher = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(REPOSITORY)})
    last = tmp_path / "output.log.2"
    try:
        wait_until(lambda: last.exists() and "VPIPE_FAULT: gil" in last.read_text(), "the last one's fault")
        assert len(alive(str(tmp_path))) == 6  # launcher, cleanup process, 3, and a sleep
    finally:
        os.kill(launcher.pid, signal.SIGKILL)
        launcher.wait()
    wait_until_gone(str(tmp_path))


@pytest.fixture
def cleanup() -> Iterator[int]:
    """The launcher's cleanup process; leaving ends it, which must not take for ever."""
    before = children_of(os.getpid())
    with local._cleanup_process():
        (process,) = set(children_of(os.getpid())) - set(before)
        yield int(process)
    assert children_of(os.getpid()) == before


def stop(process: int) -> None:
    os.kill(process, signal.SIGSTOP)
    wait_until(lambda: helpers.state_of(process) == "T", "its stop")


def test_a_helper_that_is_stopped_is_named_and_continued(
    cleanup: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Row 30 of docs/reliability.md."""
    watching = helpers.HelperWatch(limit=0.5)
    watching.look()
    stop(cleanup)
    wait_until(lambda: watching.look() or helpers.state_of(cleanup) != "T", "its continuation")
    said = capsys.readouterr().err
    assert said.startswith(f"warning: the cleanup process (process {cleanup}) was stopped (SIGSTOP) for ")
    assert said.endswith(" s: it is continued\n")


def test_the_launcher_does_not_wait_for_a_helper_that_is_stopped_at_the_end(cleanup: int) -> None:
    stop(cleanup)


def test_a_helper_that_is_gone_is_named_once(cleanup: int, capsys: pytest.CaptureFixture[str]) -> None:
    os.kill(cleanup, signal.SIGKILL)
    wait_until(lambda: helpers.state_of(cleanup) == "Z", "its end")
    watching = helpers.HelperWatch(limit=NEVER)
    for _ in range(3):
        watching._looked = 0.0
        watching.look()
    assert capsys.readouterr().err == (
        f"warning: the cleanup process (process {cleanup}) has ended before its time: what the ranks have started "
        "may outlive a launcher that is killed\n"
    )


def test_a_helper_that_does_not_end_is_killed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(helpers, "END_LIMIT", 0.1)
    with subprocess.Popen(["sleep", "600"]) as deaf:
        assert not helpers.end_helper(deaf.pid, "a helper", lambda: deaf.poll() is not None)
    assert (
        capsys.readouterr().err
        == f"warning: a helper (process {deaf.pid}) did not end within 0.1 s: it is killed\n"
    )


def test_two_signals_at_once_do_not_cut_a_save_short(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: now))
    with signals.handling_signals() as received:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
        assert received.to_end == [signal.SIGINT]
        now += signals.AGAIN + 0.1
        os.kill(os.getpid(), signal.SIGTERM)
        assert received.to_end == [signal.SIGINT, signal.SIGTERM]


def test_a_signal_that_comes_when_all_is_done_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is complete: it was not "stopped by you", which the launcher says after any SystemExit."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    run_ranks_here(Ranks(["done"], 1, tmp_path, ["stage 0"], interpreter=STAND_IN, quiet=True))


def test_a_rank_that_starts_when_its_launcher_has_died_ends(tmp_path: Path) -> None:
    """Also if nobody has waited for the launcher yet: it is still listed among the processes."""
    code = "from vpipe.launch.rank import end_with_launcher; end_with_launcher(); print('goes on')"
    with subprocess.Popen(["true"]) as launcher:
        wait_until(
            lambda: Path(f"/proc/{launcher.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        )
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "VPIPE_LAUNCHER": str(launcher.pid)}
        rank = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=False)
    assert (rank.returncode, rank.stdout) == (1, b"")


AGENT = """
import subprocess, sys
rank = "from vpipe.launch.rank import end_with_launcher; end_with_launcher(); print('begun', flush=True)"
subprocess.run([sys.executable, "-c", rank + "; import time; time.sleep(600)"], cwd=sys.argv[1])
"""


def test_a_rank_of_torchrun_ends_with_its_agent(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    environment.pop("VPIPE_LAUNCHER", None)
    with subprocess.Popen(
        [sys.executable, "-c", AGENT, str(tmp_path)], env=environment, stdout=subprocess.PIPE
    ) as agent:
        try:
            assert agent.stdout is not None
            assert agent.stdout.readline() == b"begun\n"
        finally:
            agent.kill()
    wait_until_gone(str(tmp_path))
