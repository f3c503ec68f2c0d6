"""Ranks that are forked from their launcher: what they inherit, what they leave behind, and when there are none."""

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from vpipe.config import RunConfig
from vpipe.graph import ModelGraph
from vpipe.launch import forked
from vpipe.launch.forked import ForkedRank, RankStart, can_fork
from vpipe.launch.local import Ranks, run_ranks_here
from vpipe.pipeline import captured
from vpipe.system.start import Phases
from vpipe.train import preload
from vpipe.train.workload import configured_model

ENVIRONMENT = {"RANK": "7", "HOME": "/", "PATH": os.environ["PATH"]}


def start(arguments: list[str], directory: Path, log: int, kept: Sequence[int] = ()) -> ForkedRank:
    with pytest.MonkeyPatch.context() as patch:  # pytest's streams are files that a fork closes
        patch.setattr(sys, "stdout", sys.__stdout__)
        patch.setattr(sys, "stderr", sys.__stderr__)
        return ForkedRank(RankStart(arguments, ENVIRONMENT, directory, log, log, kept))


@contextmanager
def output(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def test_a_forked_rank_runs_the_command_with_its_own_streams_and_exit_code(tmp_path: Path) -> None:
    with output(tmp_path / "log") as log:
        for arguments, code in ((["--version"], 0), (["no-such-command"], 2)):
            rank = start(arguments, tmp_path, log)
            assert rank.wait() == rank.poll() == code
    first, second = (tmp_path / "log").read_text().splitlines()
    assert first.startswith("vpipe ")
    assert second.startswith("error: no such command")


def test_it_has_the_environment_the_directory_and_the_descriptors_of_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look() -> None:
        open_files = sorted(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
        comm = Path("/proc/self/comm").read_text().strip()
        print(os.environ == ENVIRONMENT, os.getcwd(), open_files[:4], comm, os.getsid(0) == os.getpid())
        print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, bool(os.read(0, 1)))

    monkeypatch.setattr(forked, "_command", look)
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        with output(tmp_path / "log") as log, output(tmp_path / "page") as page:
            assert start([], tmp_path, log, [page]).wait() == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    # The fourth is of the listing itself.
    opened = sorted([0, 1, 2, page, 3 if page != 3 else 4])[:4]
    expected = f"True {tmp_path} {opened} rank 7 True\nTrue False\n"
    assert (tmp_path / "log").read_text() == expected


def test_a_killed_one_is_reported_as_by_popen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "_command", signal.pause)
    with output(tmp_path / "log") as log:
        rank = start([], tmp_path, log)
    assert rank.poll() is None
    rank.kill()
    assert rank.wait() == -signal.SIGKILL
    rank.send_signal(signal.SIGTERM)  # nothing happens to one that has ended


def test_a_process_with_threads_is_not_forked() -> None:
    before = can_fork()  # a worker of pytest has threads
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        assert not can_fork()
        name = Path(f"/proc/self/task/{thread.native_id}/comm")
        name.write_text("jemalloc_bg_thd")  # as a library's that starts it again in a fork
        assert can_fork() == before
    finally:
        ended.set()
        thread.join()


def test_a_process_that_has_opened_a_gpu_is_not_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forked, "GPU_FILES", str(tmp_path / "nvidia"))
    with output(tmp_path / "nvidiactl"):
        assert not can_fork()


def test_a_signal_ends_a_launcher_that_prepares(tmp_path: Path) -> None:
    """There is no rank yet to pass it on to, and imports take seconds."""
    ranks = Ranks(
        ["train"],
        1,
        tmp_path,
        ["stage 0"],
        quiet=True,
        prepare=lambda phases: signal.raise_signal(signal.SIGTERM),
    )
    with pytest.raises(SystemExit) as ended:
        run_ranks_here(ranks)
    assert ended.value.code == 128 + signal.SIGTERM


def test_the_model_is_captured_once_for_all_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = []

    def capture(model: nn.Module, *rest: object, chunked_loss: bool, keep: bool) -> ModelGraph:
        assert keep  # no code of a user is in it
        captures.append(model)
        return object()  # type: ignore[return-value]

    monkeypatch.setattr(captured, "capture", capture)
    monkeypatch.setattr(captured, "_ahead", None)
    monkeypatch.setattr(preload, "_prepared", None)
    monkeypatch.setattr(preload, "can_fork", lambda: True)
    threads = torch.get_num_threads()
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 64, "sequence_length": 8}
    config = RunConfig(model_type="bert", batch_size=2, stages=2, **sizes)
    for _ in range(2):
        preload.preload(config, Phases("launch"))
    torch.set_num_threads(threads)
    model = configured_model(config, "meta")
    assert captures == [model]
    other = RunConfig(model_type="bert", batch_size=4, stages=2, **sizes)
    assert configured_model(other, "meta") is not model


def test_a_graph_of_other_sizes_precision_or_model_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "capture", lambda *given, **options: object())
    monkeypatch.setattr(captured, "_ahead", None)
    model, batch = nn.Linear(2, 2), {"input": torch.zeros(3, 2)}
    captured.capture_ahead(model, batch, None, "fp32", True)
    graph = captured.captured(model, batch, None, "fp32", True)
    assert captured.captured(model, {"input": torch.ones(3, 2)}, None, "fp32", True) is graph
    assert captured.captured(model, {"input": torch.zeros(4, 2)}, None, "fp32", True) is not graph
    assert captured.captured(model, batch, None, "bf16", True) is not graph
    assert captured.captured(model, batch, None, "fp32", False) is not graph
    assert captured.captured(nn.Linear(2, 2), batch, None, "fp32", True) is not graph
    assert captured.captured(model, batch, lambda output: output.sum(), "fp32", True) is not graph
