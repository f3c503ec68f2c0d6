"""The device of a rank, the channel between two ranks, and ranks that share a GPU; no GPU is needed."""

import os
import signal
from pathlib import Path

import pytest
import torch

from vpipe.communication.choice import CUDA_IPC, GLOO, NCCL, SHARED_MEMORY, STAGED, RankLocation, choose_kind
from vpipe.errors import PeerError, VPipeError
from vpipe.launch import helpers, mps
from vpipe.system.device import choose_device, limit_memory
from vpipe.system.environment import ALLOCATOR, DEVICE, GPU_SHARE

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of a host without a GPU")


def place(
    host: str = "a", gpu: int | None = None, cut_off: tuple[int, ...] = (), nccl: bool = True, ipc: str = "7"
) -> RankLocation:
    """Of a rank with GPU `gpu` of its host, which finds by its number that it cannot read these."""
    if gpu is None:
        return RankLocation(host, ipc, "", [], False)
    return RankLocation(host, ipc, f"GPU-{host}{gpu}", [f"GPU-{host}{other}" for other in cut_off], nccl)


@pytest.mark.parametrize(
    ("wanted", "mine", "theirs", "kind"),
    [
        ("auto", place(), place(), SHARED_MEMORY),
        ("auto", place(), place("b"), GLOO),
        ("gloo", place(), place(), GLOO),
        ("auto", place(gpu=0), place(gpu=0), CUDA_IPC),
        ("auto", place(gpu=0), place(gpu=1), CUDA_IPC),  # if the trial copy arrives
        ("auto", place(gpu=0, cut_off=(1,)), place(gpu=1), NCCL),
        ("auto", place(gpu=0, cut_off=(1,), nccl=False), place(gpu=1), STAGED),
        ("auto", place(gpu=0), place(gpu=1, ipc="8"), NCCL),  # two containers
        ("auto", place(gpu=0), place(gpu=0, ipc="8"), STAGED),
        ("auto", place(gpu=0), place("b", gpu=0), NCCL),
        ("auto", place(gpu=0, nccl=False), place("b", gpu=0), STAGED),
        ("gloo", place(gpu=0), place(gpu=0), STAGED),
        ("nccl", place(gpu=0), place(gpu=1), NCCL),
        ("nccl", place(gpu=0), place(gpu=0), CUDA_IPC),  # NCCL refuses two ranks on one GPU
    ],
)
def test_the_best_channel_that_both_ends_have(
    wanted: str, mine: RankLocation, theirs: RankLocation, kind: str
) -> None:
    assert choose_kind(wanted, mine, theirs) == choose_kind(wanted, theirs, mine) == kind


@pytest.mark.parametrize(
    ("wanted", "mine", "theirs", "kind"),
    [
        ("auto", place(gpu=0), place(gpu=1), NCCL),
        ("auto", place(gpu=0), place(gpu=1, nccl=False), STAGED),
        ("auto", place(gpu=0), place(gpu=0), STAGED),
        ("nccl", place(gpu=0), place(gpu=0), STAGED),
    ],
)
def test_the_channel_where_the_trial_copy_failed(
    wanted: str, mine: RankLocation, theirs: RankLocation, kind: str
) -> None:
    for one, other in ((mine, theirs), (theirs, mine)):
        assert choose_kind(wanted, one, other, failed=True) == kind
    with pytest.raises(PeerError, match=f"{mine.gpu} and {theirs.gpu} failed to, in a trial: use 'auto'"):
        choose_kind("cuda_ipc", mine, theirs, failed=True)


@pytest.mark.parametrize(
    ("wanted", "mine", "theirs", "said"),
    [
        ("auto", place(), place(gpu=0), "give all ranks GPUs, or none"),
        ("nccl", place(), place(), "the ranks are on the CPU"),
        ("shared_memory", place(), place("b"), "all ranks on one host"),
        ("cuda_ipc", place(gpu=0), place("b", gpu=0), "use 'auto'"),
    ],
)
def test_a_channel_that_cannot_be_is_refused(
    wanted: str, mine: RankLocation, theirs: RankLocation, said: str
) -> None:
    with pytest.raises(PeerError, match=said):
        choose_kind(wanted, mine, theirs)


@needs_no_gpu
def test_a_host_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DEVICE, raising=False)
    assert choose_device(None, 3) == torch.device("cpu")
    assert limit_memory(torch.device("cpu"), 10) is None
    with pytest.raises(VPipeError, match="this host has 0 GPUs"):
        choose_device("cuda:1", 0)


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "mps:0"])
def test_a_device_that_is_none(name: str) -> None:
    with pytest.raises(VPipeError, match=f"device is '{name}'"):
        choose_device(name, 0)


def test_gpus_are_counted_by_their_files(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert mps.count_gpus(tmp_path) == 2


def test_ranks_with_a_gpu_each_need_no_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    memory = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    with mps.sharing([0, 1]) as environments:
        assert environments == [{DEVICE: f"cuda:{gpu}", GPU_SHARE: "1", **memory} for gpu in (0, 1)]


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_settings_of_the_allocator_that_a_user_has_made_hold(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in ALLOCATOR:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "max_split_size_mb:64")
    with mps.sharing([0]) as environments:
        assert environments == [{DEVICE: "cuda:0", GPU_SHARE: "1"}]


def test_without_the_daemon_ranks_take_turns_and_are_warned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mps, "CONTROL", "no-such-program")
    with mps.sharing([0, 0, 1]) as environments:
        assert [environment[GPU_SHARE] for environment in environments] == ["2", "2", "1"]
    assert "2 ranks share GPU 0, one after the other" in capsys.readouterr().err


@pytest.mark.parametrize("guard", [None, signal.SIGSTOP, signal.SIGKILL])
def test_the_daemon_lives_as_long_as_the_run(
    guard: signal.Signals | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a program in its place that writes down how it was called; also if its guard was stopped, or killed."""
    calls = tmp_path / "calls"
    program = tmp_path / mps.CONTROL
    program.write_text(
        f'#!/bin/sh\necho "$@" $CUDA_MPS_PIPE_DIRECTORY >> {calls}\n[ "$1" = -d ] || cat >> {calls}\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    with mps.sharing([0, 0, 0, 0]) as environments:
        assert all(environment[ALLOCATOR[0]] == "expandable_segments:True" for environment in environments)
        folder = Path(environments[0]["CUDA_MPS_PIPE_DIRECTORY"])
        assert folder.is_dir()
        assert {environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] for environment in environments} == {"25"}
        if guard is not None:
            (process,) = helpers._helpers
            os.kill(process, guard)
    started, ended, said = calls.read_text().splitlines()
    assert started == f"-d {folder}"
    assert ended == str(folder)
    assert said.startswith("quit")
    assert not folder.parent.exists()
