"""The process that captures the model of a run before its ranks need it."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
import yaml

from vpipe.config.file import read_config
from vpipe.launch.mps import share_one_gpu
from vpipe.pipeline.captured import captured
from vpipe.train import capture_ahead
from vpipe.train.capture_ahead import CAPTURED, capturing_ahead
from vpipe.train.workload import build_workload

LIMIT = 120.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VPIPE_CACHE", str(tmp_path / "kept"))
    monkeypatch.setattr(capture_ahead, "count_gpus", lambda: 1)
    # By its path, as it is written in the file: ranks read a copy of the configuration, which has it in full.
    transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, use_cache=False).save_pretrained(
        tmp_path
    )
    keys = {
        "model": "config.json",
        "sequence_length": 8,
        "batch_size": 2,
        "synthetic_data": True,
        "stages": 2,
    }
    (tmp_path / "run.yml").write_text(yaml.safe_dump(keys))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    found: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def noted(*arguments: object, **options: object) -> subprocess.Popen[bytes]:
        found.append(start(*arguments, **options))  # type: ignore[call-overload]
        return found[-1]

    monkeypatch.setattr(subprocess, "Popen", noted)
    return found


@pytest.mark.long  # it imports torch and transformers
def test_what_it_captures_is_found_by_others_and_captured_once(
    folder: Path, started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read_config(Path("run.yml"))
    with capturing_ahead(config):
        started[0].wait(LIMIT)
        assert started[0].returncode == 0
    with capturing_ahead(config):
        assert len(started) == 1  # its name is kept: no other process
    monkeypatch.setattr(torch.export, "export", None)  # nobody may export it again
    work = build_workload(config, "meta")
    assert captured(work.model, work.batch, work.loss_fn, config.precision, config.chunked_loss).blocks
    assert len(list((folder / "kept" / CAPTURED).iterdir())) == 1


def test_it_ends_with_the_run(folder: Path, started: list[subprocess.Popen[bytes]]) -> None:
    begun = time.monotonic()
    with capturing_ahead(read_config(folder / "run.yml")):
        pass
    assert started[0].returncode != 0
    assert time.monotonic() - begun < LIMIT / 10


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(capture_ahead, "count_gpus", lambda: 0),
        lambda patch: patch.setenv("VPIPE_CACHE", ""),
    ],
)
def test_where_ranks_are_forked_or_nothing_is_kept_there_is_none(
    folder: Path,
    started: list[subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[pytest.MonkeyPatch], None],
) -> None:
    change(monkeypatch)
    with capturing_ahead(read_config(folder / "run.yml")):
        assert not started


def test_one_gpu_is_shared_by_several_ranks() -> None:
    assert share_one_gpu([0, 0])
    assert not share_one_gpu([0])
    assert not share_one_gpu([0, 0, 1, 1])
    assert not share_one_gpu(None)
