"""Saving beside the training: nothing torn, nothing lost, whatever fails at whatever moment."""

import errno
import os
import resource
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoints import OPTIMIZERS, alone
from tests.examples import example, varied
from vpipe import Pipeline, checkpoint
from vpipe.checkpoint import files, manifest, writing
from vpipe.errors import VPipeError
from vpipe.pipeline.threads import run_ranks

pytestmark = pytest.mark.usefixtures("capture_once")


def test_saving_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    tiny = example("sequential", layers=2)

    def work(pipe: Pipeline) -> list[Path]:
        return [checkpoint.save(pipe, tmp_path, {"attempt": attempt}) for attempt in (1, 2)]

    first, second = alone(work, tiny)
    assert first == second
    assert checkpoint.verify(second).extra == {"attempt": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000000"]


def test_a_replacement_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = os.rename

    def refuse(source: Path, target: Path) -> None:
        if ".tmp-" in source.name:
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    def work(pipe: Pipeline) -> None:
        checkpoint.save(pipe, tmp_path, {"attempt": 1})
        monkeypatch.setattr(os, "rename", refuse)
        with pytest.raises(VPipeError, match=r"cannot rename .*: Input/output error"):
            checkpoint.save(pipe, tmp_path, {"attempt": 2})

    alone(work, example("sequential", layers=2))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000000"]
    assert checkpoint.verify(tmp_path / "step-00000000").extra == {"attempt": 1}


def failures_of_saving(directory: Path, extra: Any) -> list[str]:
    """The error of each of two ranks when it saves; training then goes on."""
    model, batch, loss_fn = example("sequential", layers=2)

    def work(world: Any) -> str:
        with Pipeline(
            model, batch, optimizer=OPTIMIZERS["sgd"], loss_fn=loss_fn, minibatches=2, world=world
        ) as pipe:
            with pytest.raises(VPipeError) as caught:
                checkpoint.save(pipe, directory, extra)
            assert len([loss for _, loss in pipe.train([batch] * 2)]) == 1
            return str(caught.value)

    return run_ranks(2, work)


@pytest.mark.parametrize("moment", ["write", "sync", "commit"])
def test_a_full_disk_is_told_to_every_rank_and_nothing_stays(
    saved: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    full = "manifest.json" if moment == "commit" else "stage-001.safetensors"

    def refuse(path: Path) -> None:
        if path.name == full:
            raise OSError(errno.ENOSPC, "No space left on device")

    sync, header = files.sync, files._header
    if moment == "write":
        monkeypatch.setattr(files, "_header", lambda path, *rest: refuse(path) or header(path, *rest))
    monkeypatch.setattr(files, "sync", lambda path: refuse(path) or sync(path))
    monkeypatch.setattr(manifest, "sync", lambda path: refuse(path) or sync(path))
    before = sorted(saved.rglob("*"))
    messages = failures_of_saving(saved, {})
    rank = 0 if moment == "commit" else 1
    assert all("No space left on device" in message for message in messages)
    assert all(f"rank {rank}: cannot write" in message for message in messages) == (moment != "commit")
    assert sorted(saved.rglob("*")) == before


def test_what_the_kernel_refuses_in_the_middle_of_a_file(saved: Path) -> None:
    before = sorted(saved.rglob("*"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (2000, limits[1])
    )  # Python ignores the signal that comes with it
    try:
        messages = failures_of_saving(saved, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert all("cannot write" in message and "File too large" in message for message in messages)
    assert sorted(saved.rglob("*")) == before
    assert checkpoint.newest(saved) == saved / "step-00000002"


def test_a_file_in_the_directorys_place(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    messages = failures_of_saving(tmp_path / "runs", {})
    assert all("cannot make" in message for message in messages)


def test_extra_must_be_json(tmp_path: Path) -> None:
    messages = failures_of_saving(tmp_path, {"config": {1, 2}})
    assert all("must be what JSON can hold" in message for message in messages)
    assert list(tmp_path.iterdir()) == []


# Beside the training


def tiny_run(world: Any) -> tuple[Pipeline, list[Any]]:
    model, batch, loss_fn = example("sequential", layers=2)
    pipe = Pipeline(model, batch, optimizer=OPTIMIZERS["adamw"], loss_fn=loss_fn, minibatches=2, world=world)
    return pipe, varied(batch, 12)


def train(pipe: Pipeline, data: list[Any]) -> None:
    for _ in pipe.train(data):
        pass


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Files of stages are not on the disk before this is set."""
    go_on, sync = threading.Event(), files.sync
    monkeypatch.setattr(files, "sync", lambda path: go_on.wait(200) and sync(path))
    return go_on


def test_training_goes_on_while_what_was_there_is_written(tmp_path: Path, held_up: threading.Event) -> None:
    def work(world: Any) -> None:
        pipe, data = tiny_run(world)
        with pipe:
            saver = checkpoint.Saver(pipe, tmp_path / "beside")
            train(pipe, data[:4])
            saver.start({})
            train(pipe, data[4:8])  # nobody waits for the disk
            assert pipe.updates == 4
            assert not (tmp_path / "beside" / "step-00000002").exists()
            world.all_gather("trained", None)
            held_up.set()
            assert saver.finish() == tmp_path / "beside" / "step-00000002"
            saver.start({})  # into the same memory
            saver.finish()
            checkpoint.load(pipe, tmp_path / "beside" / "step-00000002")
            train(pipe, data[4:8])
            checkpoint.save(pipe, tmp_path / "again", {})

    run_ranks(2, work)
    assert checkpoint.verify(tmp_path / "beside" / "step-00000004") == checkpoint.verify(
        tmp_path / "again" / "step-00000004"
    )


def test_a_save_waits_for_the_one_before(tmp_path: Path, held_up: threading.Event) -> None:
    def work(world: Any) -> None:
        pipe, data = tiny_run(world)
        with pipe:
            saver = checkpoint.Saver(pipe, tmp_path)
            saver.start({})
            train(pipe, data[:2])
            threading.Timer(0.1, held_up.set).start()
            saver.start({})
            assert (tmp_path / "step-00000000").exists()
            saver.finish()

    run_ranks(1, work)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-00000000", "step-00000001"]


def test_a_writer_that_crashes_is_told_and_the_next_save_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[str] = []
    header = files._header

    def work(world: Any) -> None:
        pipe, data = tiny_run(world)
        with pipe:
            saver = checkpoint.Saver(
                pipe, tmp_path, report=reported.append, failed=lambda: reported.append("failed")
            )
            monkeypatch.setattr(files, "_header", lambda *_: 1 // 0)
            saver.start({})
            train(pipe, data[:4])
            with pytest.raises(VPipeError, match="was not saved: rank 0: ZeroDivisionError"):
                saver.finish()
            world.all_gather("reported", None)
            monkeypatch.setattr(files, "_header", header)
            saver.start({})
            assert saver.finish() == tmp_path / "step-00000002"

    run_ranks(2, work)
    assert len(reported) == 4  # each rank's log has it
    assert all("ZeroDivisionError" in line or line == "failed" for line in reported)


class Killed(BaseException):
    """Nothing of ours runs after it, as after SIGKILL."""


class Moments:
    """Kills whoever comes to the given one of the moments at which a save touches the disk; 0: nobody."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 0
        for owner, name in (
            (files, "_bytes_of"),
            (files, "sync"),
            (manifest, "sync"),
            (writing, "sync"),
            (writing.os, "rename"),
            (Path, "mkdir"),
            (Path, "write_text"),
            (writing.shutil, "rmtree"),
        ):
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, function: Any) -> Any:
        def run(*arguments: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                raise Killed
            return function(*arguments, **options)

        return run


def interrupted_save(pipe: Pipeline, directory: Path, moments: Moments, moment: int) -> checkpoint.Manifest:
    """What the newest checkpoint is, once a save was killed at the moment, or ended before it came."""
    saver = checkpoint.Saver(pipe, directory, report=lambda line: None)
    moments.left = moment
    saver.start({"attempt": moment})
    saver.wait()
    moments.left = 0
    found = checkpoint.newest(directory)
    assert found is not None
    return checkpoint.verify(found)


def test_a_crash_at_any_moment_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once where it is the first of its step, and once where it replaces one."""
    new, replaced = tmp_path / "new", tmp_path / "replaced"

    def work(world: Any) -> int:
        pipe, data = tiny_run(world)
        with pipe:
            checkpoint.save(pipe, new, {"attempt": 0})
            train(pipe, data[:2])
            checkpoint.save(pipe, replaced, {"attempt": 0})
            moments = Moments(monkeypatch)
            for moment in range(1, 200):
                first = interrupted_save(pipe, new, moments, moment)
                again = interrupted_save(pipe, replaced, moments, moment)
                assert (first.updates, first.extra) in [(0, {"attempt": 0}), (1, {"attempt": moment})]
                assert again.updates == 1
                if first.extra == again.extra == {"attempt": moment}:
                    return moment
                if first.updates:
                    shutil.rmtree(new / "step-00000001")  # the next one is the first of its step again
        raise AssertionError("never finished")

    (moments,) = run_ranks(1, work)
    assert moments > 15


def test_every_type_is_written_under_the_name_that_the_library_reads(tmp_path: Path) -> None:
    path = tmp_path / "all.safetensors"
    tensors = {str(dtype): torch.zeros(4, dtype=dtype) for dtype in files._KINDS}
    files.write_tensors(path, tensors, {})
    assert {name: t.dtype for name, t in load_file(path).items()} == {n: t.dtype for n, t in tensors.items()}
