"""A run's checkpoints: when it saves, which ones stay, how it stops, goes on, and what a failing disk does to it.

The whole trainer, with ranks that are threads.
"""

import errno
import math
import re
import signal
from collections.abc import Callable
from functools import cache
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vpipe import checkpoint
from vpipe.checkpoint import files
from vpipe.communication import InProcessHub
from vpipe.config import RunConfig
from vpipe.config.file import check_values
from vpipe.errors import NonFiniteError, OutOfMemoryError, PeerError, Stopped, VPipeError
from vpipe.observe.recorder import Recorder
from vpipe.pipeline import requests
from vpipe.pipeline.threads import run_ranks
from vpipe.stage.stage import Stage
from vpipe.train import save_policy, trainer
from vpipe.train.models import build_model
from vpipe.train.trainer import Trainer

TINY = {
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "vocab_size": 64,
    "sequence_length": 8,
    "batch_size": 2,
    "synthetic_data": True,
    "max_samples": 60,
    "evaluation_samples": 4,
    "dropout": 0.1,
    "stages": 2,
    "max_updates": 8,
    "print_frequency": 4,
    "learning_rate": 0.003,
    "keep_checkpoints": 100,
}
SYNCHRONOUS = {"schedule": "1f1b", "minibatches": 2}
ASYNCHRONOUS = {"schedule": "vpipe"}


@cache
def the_model() -> Any:
    return build_model(check_values(TINY, Path("tiny.yml")), "meta")


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capture_once: None) -> Callable[..., Path]:
    """Train with these keys, in the log directory `runs`; the folder of the run."""
    monkeypatch.setattr(trainer, "configured_model", lambda config, device: the_model().model)

    def run(runs: str = "runs", resume: str | None = None, **keys: Any) -> Path:
        config = check_values(TINY | keys | {"log_directory": str(tmp_path / runs)}, Path("tiny.yml"))
        assert isinstance(config, RunConfig)
        before = set((tmp_path / runs).glob("*"))

        def work(world: Any) -> None:
            rank = Trainer(config, world)
            try:
                rank.train(resume)
            finally:
                rank.close()

        run_ranks(2, work)
        made = [path for path in (tmp_path / runs).glob("*") if path.name != "cache"]
        return next(path for path in made if path not in before)

    return run


def updates(run: Path) -> list[int]:
    return [checkpoint.read_manifest(path).updates for path in checkpoint.checkpoints(run / "checkpoints")]


def losses_of(run: Path) -> dict[int, float | None]:
    manifests = [checkpoint.read_manifest(path) for path in checkpoint.checkpoints(run / "checkpoints")]
    return {manifest.updates: checkpoint.evaluation_loss(manifest) for manifest in manifests}


def last(run: Path) -> checkpoint.Manifest:
    return checkpoint.verify(checkpoint.checkpoints(run / "checkpoints")[-1])


def log(run: Path, rank: int = 0) -> str:
    return (run / f"output.log.{rank}").read_text()


@pytest.fixture
def after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int, str], None]:
    """Request something on one rank, once that rank has made so many updates."""
    asking: list[tuple[int, int, str]] = []
    update = Recorder.update

    def look(self: Recorder, number: int, loss: float, epoch: int) -> None:
        for one in [one for one in asking if one[:2] == (self._pipe.rank, number + 1)]:
            asking.remove(one)
            getattr(self._pipe, f"request_{one[2]}")()
        update(self, number, loss, epoch)

    monkeypatch.setattr(requests, "LOOK", 0.0)
    monkeypatch.setattr(Recorder, "update", look)
    return lambda rank, done, what: asking.append((rank, done, what))


def test_an_asynchronous_run_evaluates_and_saves_where_it_says(train: Callable[..., Path]) -> None:
    """The pipeline is drained there, and goes on; the log begins as the guides say."""
    run = train(evaluation_interval=3, checkpoint_interval=4, max_updates=8, **ASYNCHRONOUS)
    evaluated = re.findall(r"^Iteration (\d+), Evaluation loss", log(run), re.M)
    assert [int(number) for number in evaluated] == [3, 6, 8]
    assert set(updates(run)) >= {4, 8}
    resumed = train(
        "again", resume=str(run / "checkpoints" / "step-00000004"), evaluation_interval=3, **ASYNCHRONOUS
    )
    assert re.findall(r"^Iteration (\d+), Evaluation loss", log(resumed), re.M) == ["6", "8"]
    for rank in range(2):
        lines = log(run, rank).splitlines()
        assert lines[:2] == [
            f"Finished initializing process group; backend: auto, rank: {rank}, world_size: 2",
            f"[Rank {rank}] Stage: {rank}, Rank in stage: 0",
        ]
        trained = [line for line in lines if line.startswith("Epoch")]
        assert lines.index("Training...") < lines.index(trained[0])
        assert trained[0].startswith("Epoch 0, Iteration 0, Loss: ")
        assert trained[1].startswith("Epoch 0, Iteration 4, Loss: ")
    assert "Iteration 0" not in log(resumed)


def test_the_newest_and_the_best_stay(train: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    reported = {2: 3.0, 4: 2.0, 6: 2.5, 8: 2.75}

    def evaluate(self: Trainer) -> tuple[float, dict[str, float]]:
        return reported[self.pipe.updates], {}

    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    keys: dict[str, Any] = {"evaluation_interval": 2, "checkpoint_interval": 3, **SYNCHRONOUS}
    run = train(**keys)
    # 2 and 4 are the best so far; at 3 and 6 it is time; 8 is the end.
    assert losses_of(run) == {2: 3.0, 3: None, 4: 2.0, 6: 2.5, 8: 2.75}
    run = train("pruned", keep_checkpoints=1, **keys)
    assert losses_of(run) == {4: 2.0, 8: 2.75}
    assert last(run).extra["best_evaluation_loss"] == 2.0


def test_a_run_that_saves_only_at_its_end_does_not_save_the_best_before(train: Callable[..., Path]) -> None:
    run = train(evaluation_interval=2, **SYNCHRONOUS)
    assert updates(run) == [8]
    assert losses_of(run)[8] is not None


def test_the_clock(train: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute passes whenever somebody looks."""
    monkeypatch.setattr(save_policy, "time", SimpleNamespace(monotonic=count(step=60.0).__next__))
    assert updates(train(checkpoint_minutes=1, **SYNCHRONOUS)) == list(range(2, 9))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_that_is_stopped_goes_on_as_if_it_had_not_been(
    train: Callable[..., Path], after: Callable[[int, int, str], None], rank: int, tmp_path: Path
) -> None:
    whole = train("whole", evaluation_interval=3, **SYNCHRONOUS)
    if rank == 1:  # which computes the loss
        after(1, 3, "save")
        after(1, 4, "stop")
        expected, stopped_after = [4, 5], 5
    else:
        after(0, 1, "stop")
        expected, stopped_after = [2], 2
    with pytest.raises(Stopped, match=f"it has made {stopped_after} of 8 updates.*go on with --resume auto"):
        train(evaluation_interval=3, **SYNCHRONOUS)
    (first,) = [path for path in (tmp_path / "runs").iterdir() if path.name != "cache"]
    assert updates(first) == expected
    second = train(resume="auto", evaluation_interval=3, **SYNCHRONOUS)
    assert f"step-{stopped_after:08d} after {stopped_after} updates" in log(second)
    assert last(second).files == last(whole).files  # hashes of all weights and momenta
    assert last(second).extra == last(whole).extra  # and the place in the data


def test_a_program_that_trains_gets_its_signals_back(
    monkeypatch: pytest.MonkeyPatch, capture_once: None, tmp_path: Path
) -> None:
    """After a failure too; but whoever ends with it may take them without a gap."""
    monkeypatch.setattr(trainer, "configured_model", lambda config, device: the_model().model)
    config = check_values(TINY | {"stages": 1, "log_directory": str(tmp_path / "runs")}, Path("tiny.yml"))
    assert isinstance(config, RunConfig)
    during: list[Any] = []

    def own(number: int, frame: Any) -> None:
        """The program's."""

    def handlers() -> list[Any]:
        return [signal.getsignal(number) for number in before]

    def fail(self: Recorder, number: int, loss: float, epoch: int) -> None:
        during.append(handlers())
        raise RuntimeError("on purpose")

    monkeypatch.setattr(Recorder, "update", fail)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = {number: signal.signal(number, own) for number in numbers}
    try:
        alone = Trainer(config, InProcessHub(1).join(0))
        with pytest.raises(RuntimeError, match="on purpose"):
            alone.train()
        assert handlers() == [own, own, own]
        with pytest.raises(RuntimeError, match="on purpose"):
            alone.train(take_signals=lambda: during.append(handlers()))
        at_work, again, failed = during
        assert own not in at_work
        assert failed == again != [own, own, own]
        alone.close()
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)


def test_an_asynchronous_run_is_drained_saved_and_goes_on(
    train: Callable[..., Path], after: Callable[[int, int, str], None], tmp_path: Path
) -> None:
    after(1, 3, "stop")
    with pytest.raises(Stopped):
        train(**ASYNCHRONOUS)
    (first,) = [path for path in (tmp_path / "runs").iterdir() if path.name != "cache"]
    (made,) = updates(first)
    assert 4 <= made < 8
    assert last(first).extra["minibatch"] == made
    second = train(resume=str(first), **ASYNCHRONOUS)
    assert updates(second) == [8]


def test_damaged_checkpoints_are_skipped_and_reported(train: Callable[..., Path], tmp_path: Path) -> None:
    first = train(checkpoint_interval=3, **SYNCHRONOUS)
    assert updates(first) == [3, 6, 8]
    file = first / "checkpoints" / "step-00000008" / "stage-001.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    (first / "checkpoints" / "step-00000006" / "manifest.json").unlink()
    second = train(resume="auto", **SYNCHRONOUS)
    reported = log(second)
    assert "step-00000008 is skipped: " in reported
    assert "stage-001.safetensors is damaged: its hash is not the one in manifest.json" in reported
    assert "step-00000006 is skipped: " in reported
    assert "has no manifest.json" in reported
    assert "step-00000003 after 3 updates" in reported


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the second checkpoint is written."""
    header = files._header

    def refuse(path: Path, *rest: Any) -> Any:
        if "step-00000004" in path.parent.name and path.name == "stage-001.safetensors":
            raise OSError(errno.ENOSPC, "No space left on device")
        return header(path, *rest)

    monkeypatch.setattr(files, "_header", refuse)


def test_a_full_disk_is_a_loud_warning(train: Callable[..., Path], full_disk: None) -> None:
    run = train(checkpoint_interval=2, **SYNCHRONOUS)
    assert updates(run) == [2, 6, 8]
    for rank in range(2):
        assert "WARNING: checkpoint" in log(run, rank)
        assert "No space left on device" in log(run, rank)
    assert [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".")] == []


def test_a_full_disk_ends_the_run_if_it_is_to(
    train: Callable[..., Path], full_disk: None, tmp_path: Path
) -> None:
    with pytest.raises(VPipeError, match=r"step-00000004 was not saved: rank 1: .*No space left.*are whole"):
        train(checkpoint_interval=2, on_save_error="stop", max_updates=40, epochs=10, **SYNCHRONOUS)
    (run,) = [path for path in (tmp_path / "runs").iterdir() if path.name != "cache"]
    assert updates(run)[0] == 2
    assert len(updates(run)) < 19


def test_the_last_checkpoint_must_be_saved(
    train: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(files, "_header", refuse)
    with pytest.raises(VPipeError, match=r"step-00000008 was not saved: .*Read-only file system"):
        train(**SYNCHRONOUS)


@pytest.mark.parametrize("schedule", [SYNCHRONOUS, ASYNCHRONOUS])
def test_after_numbers_that_are_not_finite_the_last_checkpoint_is(
    train: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, schedule: dict[str, Any], tmp_path: Path
) -> None:
    forward = Stage.forward
    bad = 7

    def poison(stage: Stage, minibatch: int, *given: Any) -> Any:
        outputs = forward(stage, minibatch, *given)
        if stage.index == 0 and minibatch == bad:
            for tensor in outputs.values():
                tensor.fill_(math.nan)
        return outputs

    monkeypatch.setattr(Stage, "forward", poison)
    update = bad // schedule.get("minibatches", 1)
    with pytest.raises(
        (NonFiniteError, PeerError), match=f"update {update}, rank 1: the loss of minibatch {bad} is"
    ):
        train(checkpoint_interval=2, epochs=9, max_updates=30, **schedule)
    (run,) = [path for path in (tmp_path / "runs").iterdir() if path.name != "cache"]
    newest = checkpoint.newest(run / "checkpoints")
    assert newest is not None
    assert all(files.not_finite(file) is None for file in newest.glob("*.safetensors"))


def test_out_of_memory_names_the_place_and_what_was_predicted(
    train: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(stage: Stage, minibatch: int, seed: float) -> Any:
        return torch.empty(1 << 60)

    monkeypatch.setattr(Stage, "backward", run_out)
    with pytest.raises(
        OutOfMemoryError,
        match=r"rank 1, stage 1, action 1B0: out of memory: it tried to allocate \d+ bytes; it holds .* bytes",
    ) as caught:
        train(**SYNCHRONOUS)
    said = str(caught.value)
    assert "; no plan had predicted its memory; it had about " in said
    assert re.search(r"`vpipe plan tiny.yml --memory \d+ -o fits.json`", said)
