"""The watch: what a rank says of itself while it runs, and how a hang is explained."""

import json
import os
import socket
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import models
from tests.examples import varied
from tests.waiting import wait_until
from vpipe import Pipeline
from vpipe.errors import ConfigError
from vpipe.observe import hang, prometheus, recorder, watch
from vpipe.observe.figures import scalars
from vpipe.observe.hang import GONE, SUSPENDED, RankState, culprit, explain, fate_of, sentence
from vpipe.observe.prometheus import PrometheusEndpoint, exposition
from vpipe.observe.recorder import Recorder
from vpipe.observe.screen import picture, top
from vpipe.observe.watch import RankWatch
from vpipe.pipeline.threads import run_ranks
from vpipe.record.status import (
    Status,
    Waiting,
    read_statuses,
    stage_lines,
    time_shares,
    write_status,
)
from vpipe.schedule import build, lower
from vpipe.system.best_effort import LogFile
from vpipe.system.console import PlainConsole
from vpipe.system.files import replace_text
from vpipe.weights import optimizer_factory

HOURS = 3600.0


Meanwhile = Callable[[dict[int, Pipeline]], None]
"""What a test does during a run, with the pipelines of the ranks."""


def nothing(pipes: dict[int, Pipeline]) -> None:
    """For a run that is left alone."""


def recorded(
    folder: Path, *, in_0f4: Meanwhile = nothing, at_the_end: Meanwhile = nothing, port: int = 0
) -> None:
    """A run of two threads; `in_0f4` and `at_the_end` are done by its first rank, and the run waits for them.

    Only a wait of more than an hour is a hang.
    """
    model, batch, loss_fn = models.sequential()
    pipes: dict[int, Pipeline] = {}
    updates = 12

    def train(world: Any) -> None:
        optimizer = optimizer_factory("adam", 0.01, weight_decay=0.0)
        with Pipeline(
            model, batch, optimizer=optimizer, loss_fn=loss_fn, schedule="pipedream", world=world
        ) as pipe:
            pipes[world.rank] = pipe
            recorder = Recorder(
                pipe, folder, total=updates, samples=4, tokens=1, print_frequency=2, verbose_frequency=4,
                hang_limit=HOURS, prometheus_port=port,
            )  # fmt: skip

            if world.rank == 0:
                pipe.on_action(lambda work: in_0f4(pipes) if work.minibatch.number == 4 else None, ("F",))
            try:
                for update, loss in pipe.train(varied(batch, updates)):
                    recorder.update(update, loss, 0)
                    if world.rank == 0 and update == updates - 1:
                        at_the_end(pipes)
            finally:
                recorder.write_events()
                recorder.close()

    run_ranks(2, train, timeout=200.0)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch looks more often: a status ten times a second."""
    monkeypatch.setattr(watch, "BEAT", 0.01)


def test_a_hang_is_explained_by_who_waits_for_whom(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, often: None
) -> None:
    for name in ("hang.request", "hang.txt"):
        (tmp_path / name).write_text("of an earlier attempt")
    waited = answering = 0.0
    clock = SimpleNamespace(
        perf_counter=lambda: time.perf_counter() + waited, monotonic=lambda: answering, time=time.time
    )
    monkeypatch.setattr(watch, "time", clock)
    monkeypatch.setattr(hang, "time", clock)
    monkeypatch.setattr(hang, "SILENT", 10 * HOURS)  # all ranks speak, if they get a processor
    places = {0: "0F4", 1: "1RECV_F4"}

    def answered(rank: int) -> bool:
        log = (tmp_path / f"output.log.{rank}").read_text()
        return "some rank waits for more than 3600 s; the stacks of this one" in log

    def hang_for_hours(pipes: dict[int, Pipeline]) -> None:
        nonlocal waited, answering
        wait_until(lambda: {each.rank: each.place for each in read_statuses(tmp_path)} == places)
        wait_until(lambda: pipes[1].handler.waiting)
        waited = answering = 2 * HOURS
        wait_until(lambda: answered(0) and answered(1))
        assert not (tmp_path / "hang.txt").exists()  # the others have time to answer
        answering += HOURS
        wait_until((tmp_path / "hang.txt").exists)
        assert (tmp_path / "hang.txt").read_text()  # all of it is there at once
        waited = 0.0

    recorded(tmp_path, in_0f4=hang_for_hours)
    said = (tmp_path / "hang.txt").read_text()
    first, *grid = said.splitlines()
    assert first.startswith("rank 1 waits for 1RECV_F4 from rank 0 (for ")
    assert "; rank 0 has been in 0F4 for " in first
    marked = [line for line in grid if "[" in line]
    assert [line.split("[")[0].split()[-1] for line in marked] == ["B2───*", "B3───*"]
    assert marked[0].endswith("[0F4] << here")
    assert marked[1].endswith("[1RECV_F4] << waits")
    assert said.strip() in capsys.readouterr().out
    for rank in range(2):
        assert "test_watch.py" in (tmp_path / f"output.log.{rank}").read_text()  # faulthandler's stacks
    assert not (tmp_path / "hang.request").exists()  # it went on, and the next hang is another


def test_the_last_status_and_the_figures_of_each_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(tmp_path)
    statuses = read_statuses(tmp_path)
    assert [status.rank for status in statuses] == [0, 1]
    assert [status.state for status in statuses] == ["ended", "ended"]
    assert [status.updates for status in statuses] == [12, 12]
    assert all(status.memory > 2**20 for status in statuses)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {line["kind"] for line in lines} >= {"train", "stages"}
    log = (tmp_path / "output.log.1").read_text()
    assert "ms an update, communication " in log
    assert "bubble " in log
    (first, _) = stage_lines(statuses)
    shares = first["compute_share"] + first["communication_share"] + first["bubble_share"]
    assert 0 <= shares <= 1.001
    top(tmp_path, once=True)
    shown = capsys.readouterr().out
    assert "update 12 of 12" in shown
    assert "has ended" in shown


def test_prometheus_reads_what_the_ranks_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, often: None
) -> None:
    made: list[PrometheusEndpoint] = []
    reported = ""

    def at_a_free_port(folder: Path, port: int) -> PrometheusEndpoint:
        assert port == 9000
        made.append(PrometheusEndpoint(folder, 0))
        return made[0]

    def read(pipes: dict[int, Pipeline]) -> None:
        nonlocal reported
        wait_until(lambda: [bool(status.totals) for status in read_statuses(tmp_path)] == [True, True])
        reported = urllib.request.urlopen(f"http://127.0.0.1:{made[0].port}/metrics").read().decode()

    monkeypatch.setattr(recorder, "PrometheusEndpoint", at_a_free_port)
    recorded(tmp_path, at_the_end=read, port=9000)
    assert "# TYPE vpipe_updates_total counter" in reported
    assert 'vpipe_updates_total{rank="1"} ' in reported
    assert 'vpipe_weight_versions{rank="0",stage="0"} ' in reported
    assert 'vpipe_seconds_total{rank="1",kind="wait"} ' in reported
    for line in reported.splitlines():
        assert line.startswith("# ") or float(line.rpartition(" ")[2]) >= 0
    assert made[0]._listener.fileno() == -1  # it is closed


def test_a_port_that_is_taken_is_reported(tmp_path: Path) -> None:
    with (
        closing(PrometheusEndpoint(tmp_path, 0)) as taken,
        pytest.raises(ConfigError, match="prometheus_port"),
    ):
        PrometheusEndpoint(tmp_path, taken.port)


def asked(port: int, request: str) -> tuple[str, str]:
    """The first line of the answer to a request, and its text."""
    with socket.create_connection(("127.0.0.1", port), HOURS) as link:
        link.sendall(request.encode())
        answer = b"".join(iter(lambda: link.recv(4096), b"")).decode()
    head, _, body = answer.partition("\r\n\r\n")
    return head.partition("\r\n")[0], body


def test_the_endpoint_answers_what_it_has_and_refuses_the_rest(tmp_path: Path) -> None:
    write_status(status(0, "0F8"), tmp_path)
    with closing(PrometheusEndpoint(tmp_path, 0)) as endpoint:
        first, body = asked(endpoint.port, "GET /metrics?x=1 HTTP/1.1\r\nHost: here\r\n\r\n")
        assert (first, body) == ("HTTP/1.0 200 OK", exposition(read_statuses(tmp_path)))
        assert asked(endpoint.port, "HEAD / HTTP/1.1\r\n\r\n") == ("HTTP/1.0 200 OK", "")
        assert asked(endpoint.port, "GET /etc HTTP/1.1\r\n\r\n")[0] == "HTTP/1.0 404 Not Found"
        assert asked(endpoint.port, "POST / HTTP/1.1\r\n\r\n")[0] == "HTTP/1.0 405 Method Not Allowed"
        with suppress(ConnectionResetError):
            assert asked(endpoint.port, "GET /" + "x" * 9000) == ("", "")


def test_idle_connections_to_the_endpoint_take_no_thread_and_few_descriptors(tmp_path: Path) -> None:
    """Row 29 of docs/reliability.md: a further connection takes the place of the oldest."""
    write_status(status(0, "0F8"), tmp_path)
    idle: list[socket.socket] = []
    with closing(PrometheusEndpoint(tmp_path, 0)) as endpoint:
        threads, before = threading.active_count(), len(os.listdir("/proc/self/fd"))
        try:
            for number in range(200):
                idle.append(socket.create_connection(("127.0.0.1", endpoint.port), HOURS))
                if number % 2:
                    idle[-1].sendall(b"GET /metrics")  # and it never ends its request
            url = f"http://127.0.0.1:{endpoint.port}/metrics"
            assert b"vpipe_updates_total" in urllib.request.urlopen(url).read()
            assert threading.active_count() == threads
            most = before + len(idle) + prometheus.AT_ONCE
            wait_until(lambda: len(os.listdir("/proc/self/fd")) <= most)
        finally:
            for link in idle:
                link.close()


def status(rank: int, place: str, waiting: Waiting | None = None, **more: Any) -> Status:
    return Status(
        rank, (rank,), 1, "here", time.time(), place=place, inside=True, seconds=31.0, waiting=waiting, **more
    )


def test_the_sentence_goes_from_who_waits_to_who_is_waited_for() -> None:
    found = [
        RankState(status(0, "0F8")),
        RankState(status(1, "1RECV_F7", Waiting("1RECV_F7", 0, 31.0))),
        RankState(status(2, "2RECV_F7", Waiting("2RECV_F7", 1, 30.5))),
    ]
    assert sentence(found) == (
        "rank 2 waits for 2RECV_F7 from rank 1 (for 30 s); rank 1 waits for 1RECV_F7 from rank 0 (for 31 s); "
        "rank 0 has been in 0F8 for 31 s"
    )
    guilty = culprit(found)
    assert guilty is not None
    assert guilty.rank == 0


def test_ranks_that_wait_for_each_other() -> None:
    found = [
        RankState(status(0, "0RECV_B1", Waiting("0RECV_B1", 1, 20.0))),
        RankState(status(1, "1RECV_F2", Waiting("1RECV_F2", 0, 20.0))),
    ]
    assert sentence(found).endswith("they wait for each other")
    assert culprit(found) is None


@pytest.mark.parametrize("fate", [GONE, SUSPENDED])
def test_a_rank_that_says_nothing_is_the_culprit_though_it_seemed_to_wait(fate: str) -> None:
    found = [
        RankState(status(0, "0RECV_B1", Waiting("0RECV_B1", 1, 9.0))),
        RankState(status(1, "1F2", Waiting("1RECV_F2", 0, 0.1)), fate),
    ]
    guilty = culprit(found)
    assert guilty is not None
    assert guilty.rank == 1
    assert f"rank 1 {fate}: it was in 1F2" in sentence(found)


def test_a_clock_that_is_set_makes_no_rank_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The age of a status is counted by a clock that nobody sets, as long as the host has not been started again."""
    jumped = SimpleNamespace(
        time=lambda: time.time() + HOURS, monotonic=lambda: 500.0, perf_counter=time.perf_counter
    )
    monkeypatch.setattr(hang, "time", jumped)
    here = socket.gethostname()
    fresh = replace(status(0, "0F8"), host=here, monotonic=499.0, process=os.getpid())
    assert hang._state(fresh) == RankState(replace(fresh, seconds=32.0))
    old = hang._state(replace(fresh, monotonic=9000.0))  # of an earlier start of the host
    assert old.fate == hang.SILENCE


def test_a_process_that_does_not_exist_is_gone() -> None:
    assert fate_of(2**22 + 1) == GONE


def test_the_grid_of_a_late_place_is_drawn_with_its_own_minibatches(tmp_path: Path) -> None:
    schedule = lower(build("pipedream", 2, None))
    write_status(status(0, "0F9004"), tmp_path)
    write_status(status(1, "1RECV_F9004", Waiting("1RECV_F9004", 0, 40.0)), tmp_path)
    text = explain(tmp_path, schedule)
    assert "[0F9004] << here" in text
    assert "B9002" in text
    assert picture(tmp_path, PlainConsole(width=120))  # a table of the same


def with_watch(folder: Path, use: Callable[[RankWatch], Any]) -> Any:
    """What `use` makes of the watch of a rank, whose thread has ended."""
    model, batch, loss_fn = models.sequential()

    def work(world: Any) -> Any:
        optimizer = optimizer_factory("sgd", 0.01, weight_decay=0.0)
        with Pipeline(model, batch, optimizer=optimizer, loss_fn=loss_fn, world=world) as pipe:
            made = RankWatch(pipe, folder, LogFile(folder / "log"), limit=HOURS, facts=dict, say=print)
            made.close()
            return use(made)

    return run_ranks(1, work)[0]


def test_of_ten_samples_one_makes_a_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`benchmarks/speed.py` measures what they cost: less than a hundredth of the time."""

    def look(made: RankWatch) -> tuple[int, int]:
        before, statuses, beats = len(made.memory.times), [], iter([False] * 35)
        made._leave = SimpleNamespace(wait=lambda seconds: next(beats, True))  # type: ignore[assignment]
        monkeypatch.setattr(watch, "used_memory", lambda device: 2**20)
        made._look = lambda: statuses.append("running")  # type: ignore[method-assign]
        made.run()
        return len(made.memory.times) - before, len(statuses)

    assert with_watch(tmp_path, look) == (35, 4)


def test_a_rank_that_waits_at_a_meeting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def meet(made: RankWatch) -> Waiting | None:
        made._pipe.world.gathering = ("training state", -1, 100.0)
        monkeypatch.setattr(watch, "time", SimpleNamespace(perf_counter=lambda: 131.0))
        return made._waiting()

    assert with_watch(tmp_path, meet) == Waiting("the meeting 'training state'", -1, 31.0)


def test_a_reader_never_finds_a_part_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, seen = tmp_path / "hang.txt", []
    path.write_text("before")

    def rename(source: Path, target: Path) -> None:
        seen.append((source.read_text(), target.read_text()))
        source.rename(target)

    monkeypatch.setattr("os.replace", rename)
    replace_text(path, "after\n")
    assert seen == [("after\n", "before")]
    assert path.read_text() == "after\n"


def test_shares_of_a_rank_add_up_to_at_most_one() -> None:
    """A wait that began before the last seconds and ended in them is longer than they are."""
    times = {"forward": 1.0, "backward": 0.0, "update": 0.0, "send": 0.0, "wait": 9.0, "clock": 5.0}
    found = time_shares(times)
    assert found == {"compute_share": 0.1, "communication_share": 0.0, "bubble_share": 0.9}


def test_tensorboard_has_a_scalar_for_each_rank() -> None:
    ranks = [{"rank": 1, "stages": [1, 2], "bubble_share": 0.25}]
    assert list(scalars("stages", {"loss": 2.0, "ranks": ranks})) == [
        ("stages/loss", 2.0),
        ("rank 1, stage 1, 2/bubble_share", 0.25),
    ]


def test_a_run_that_has_not_begun(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has not begun"):
        top(tmp_path, once=True)
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        top(tmp_path / "none", once=True)
    assert exposition([]).startswith("# HELP")
