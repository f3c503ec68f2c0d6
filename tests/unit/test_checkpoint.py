"""Checkpoints: resuming equals never having stopped, under any layout, and nothing torn is ever loaded."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from tests import models
from tests.examples import example, varied
from vpipe import Pipeline, checkpoint
from vpipe.checkpoint import files, manifest
from vpipe.checkpoint.manifest import FileEntry, Manifest
from vpipe.errors import VPipeError
from vpipe.threads import run_ranks
from vpipe.weights import optimizer_factory
from vpipe.weights.policies import learning_rate_policy

UPDATES = 8
STOP = 2
OPTIMIZERS = {
    "sgd": optimizer_factory("sgd", 0.05, weight_decay=0.01),
    "adamw": optimizer_factory("adamw", 1e-3, weight_decay=0.1),
    "lamb": optimizer_factory("lamb", 1e-3, weight_decay=0.01),
}
SYNCHRONOUS: dict[str, Any] = {"schedule": "1f1b", "minibatches": 3}

pytestmark = pytest.mark.usefixtures("capture_once")


def bert() -> models.Example:
    """Tied weights, dropout, and blocks enough for four stages."""
    return example("bert", layers=2, dropout=0.1)


def run(
    example: models.Example,
    ranks: int,
    directory: Path,
    *,
    resume: Path | None = None,
    optimizer: str = "adamw",
    prepare: Callable[[Pipeline], None] = lambda pipe: None,
    updates: int = UPDATES,
    **options: Any,
) -> dict[int, float]:
    """Train to the end; save there, and in the middle unless the run begins from a checkpoint. The losses."""
    model, batch, loss_fn = example

    def work(world: Any) -> dict[int, float]:
        with Pipeline(
            model, batch, optimizer=OPTIMIZERS[optimizer], loss_fn=loss_fn, world=world, **options
        ) as pipe:
            prepare(pipe)
            if resume is not None:
                extra = checkpoint.load(pipe, resume)
                assert extra == {"position": pipe.updates}
            interval = pipe.schedule.update_interval
            data = varied(batch, updates * interval)
            losses = {}
            for update, loss in pipe.train(data[pipe.updates * interval :]):
                losses[update] = loss
                if update + 1 == STOP and resume is None:
                    pipe.flush()
                    checkpoint.save(pipe, directory, {"position": pipe.updates})
            checkpoint.save(pipe, directory, {"position": pipe.updates})
            return losses

    results = run_ranks(ranks, work)
    assert all(losses == results[0] for losses in results)
    return results[0]


def steps(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.name.startswith("step-"))


def tensors(path: Path) -> dict[str, Tensor]:
    return {name: t for file in sorted(path.glob("*.safetensors")) for name, t in load_file(file).items()}


def check_resumes(example: models.Example, ranks: int, tmp_path: Path, **options: Any) -> Manifest:
    """The second half alone, from the checkpoint: the same losses, and at the end the same files."""
    whole = run(example, ranks, tmp_path / "whole", **options)
    middle, end = steps(tmp_path / "whole")
    assert list(whole) == list(range(UPDATES))
    made = checkpoint.verify(middle).updates
    assert STOP <= made < UPDATES
    second = run(example, ranks, tmp_path / "second", resume=middle, **options)
    assert second == {update: loss for update, loss in whole.items() if update >= made}
    (again,) = steps(tmp_path / "second")
    assert again.name == end.name == f"step-{UPDATES:08d}"
    assert checkpoint.verify(again) == checkpoint.verify(end)  # with hashes: equal to the bit
    return checkpoint.read_manifest(middle)


def test_synchronous_with_dropout_clipping_and_tied_weights(tmp_path: Path) -> None:
    check_resumes(bert(), 2, tmp_path, clip_norm=0.5, **SYNCHRONOUS)


@pytest.mark.parametrize("optimizer", ["sgd", "lamb"])
def test_asynchronous(tmp_path: Path, optimizer: str) -> None:
    saved = check_resumes(
        example("sequential", torch.float32, dropout=0.1),
        3,
        tmp_path,
        optimizer=optimizer,
        schedule="pipedream",
        lr_scheduler=learning_rate_policy("cosine", 2, UPDATES),
    )
    record = saved.state["optimizers"][0]
    assert record["scheduler"]["last_epoch"] == saved.updates
    assert optimizer == "sgd" or record["groups"][0]["numbers"]["step"] == saved.updates


@pytest.mark.parametrize("options", [{"schedule": "pipedream"}, {"schedule": "2bw", "update_interval": 3}])
def test_tied_weights_whose_late_holder_lags(tmp_path: Path, options: dict[str, Any]) -> None:
    check_resumes(example("gpt2", layers=1, dropout=0.1), 2, tmp_path, clip_norm=0.5, **options)


def test_several_stages_on_a_rank(tmp_path: Path) -> None:
    check_resumes(bert(), 2, tmp_path, schedule="zb-v", minibatches=3)


def test_replicas(tmp_path: Path) -> None:
    options: dict[str, Any] = {"schedule": "pipedream", "replicas": (2, 1)}
    check_resumes(example("gpt2", layers=1, dropout=0.1), 3, tmp_path, **options)


@pytest.mark.parametrize("options", [{"schedule": "pipedream"}, SYNCHRONOUS])
def test_float16_with_a_loss_scale_that_overflows(tmp_path: Path, options: dict[str, Any]) -> None:
    def start_too_high(pipe: Pipeline) -> None:
        scale = pipe.runtime.updates.loss_scale
        scale.value, scale.growth_interval = 2.0**17, 4

    sequential = example("sequential", torch.float32, layers=2, dropout=0.1)
    saved = check_resumes(sequential, 2, tmp_path, precision="fp16", prepare=start_too_high, **options)
    scale = saved.state["loss_scale"]
    assert scale["enabled"]
    assert (scale["value"], scale["good_updates"]) != (2.0**17, 0)
    weights = tensors(steps(tmp_path / "whole")[0])
    assert {t.dtype for n, t in weights.items() if n.startswith("model.")} == {torch.float32}


def test_bfloat16(tmp_path: Path) -> None:
    sequential = example("sequential", torch.float32, layers=2, dropout=0.1)
    check_resumes(sequential, 2, tmp_path, precision="bf16", **SYNCHRONOUS)


def test_buffers_that_training_changes(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5))
    _, batch, loss_fn = models.sequential()
    check_resumes((model, batch, loss_fn), 2, tmp_path, **SYNCHRONOUS)
    middle, end = (tensors(path)["model.1.running_mean"] for path in steps(tmp_path / "whole"))
    assert not torch.equal(middle, end)


OTHER_LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, SYNCHRONOUS),
    (3, SYNCHRONOUS),
    (2, {**SYNCHRONOUS, "partition": (1, 4)}),
    (2, {"schedule": "gpipe", "minibatches": 3}),
    (2, {"schedule": "zb-v", "minibatches": 3}),
    (3, {**SYNCHRONOUS, "replicas": (2, 1)}),
]


@pytest.mark.parametrize(("ranks", "options"), OTHER_LAYOUTS)
def test_another_layout_goes_on_with_the_same_training(
    tmp_path: Path, ranks: int, options: dict[str, Any]
) -> None:
    policy = learning_rate_policy("polynomial", 2, UPDATES)
    whole = run(bert(), 2, tmp_path / "whole", lr_scheduler=policy, **SYNCHRONOUS)
    middle, end = steps(tmp_path / "whole")
    second = run(bert(), ranks, tmp_path / "second", resume=middle, lr_scheduler=policy, **options)
    assert second == pytest.approx({u: loss for u, loss in whole.items() if u >= STOP}, rel=1e-9)
    expected, got = tensors(end), tensors(steps(tmp_path / "second")[0])
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-6, atol=1e-9, msg=name)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_another_partition_of_a_chain_is_equal_to_the_bit(tmp_path: Path, ranks: int) -> None:
    sequential = example("sequential", dropout=0.1)
    whole = run(sequential, 3, tmp_path / "whole", **SYNCHRONOUS)
    middle, end = steps(tmp_path / "whole")
    second = run(sequential, ranks, tmp_path / "second", resume=middle, **SYNCHRONOUS)
    assert second == {u: loss for u, loss in whole.items() if u >= STOP}
    expected, got = tensors(end), tensors(steps(tmp_path / "second")[0])
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("options", [{"schedule": "pipedream"}, {**SYNCHRONOUS, "replicas": (1, 2)}])
def test_loading_into_another_layout_and_saving_again_changes_nothing(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    gpt2 = example("gpt2", layers=1, dropout=0.1)
    run(gpt2, 2, tmp_path / "whole", optimizer="lamb", schedule="2bw", update_interval=2)
    end = steps(tmp_path / "whole")[-1]
    run(gpt2, 3, tmp_path / "again", resume=end, optimizer="lamb", updates=0, **options)
    again = steps(tmp_path / "again")[0]
    expected, got = tensors(end), tensors(again)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    assert numbers(again) == numbers(end)


def numbers(path: Path) -> dict[str, Any]:
    records = checkpoint.read_manifest(path).state["optimizers"]
    return {name: g["numbers"] for r in records for g in r["groups"] for name in g["parameters"]}


def test_a_run_in_another_precision_keeps_its_own_scale(tmp_path: Path) -> None:
    sequential = example("sequential", torch.float32, layers=2, dropout=0.1)
    run(sequential, 1, tmp_path / "half", precision="fp16", **SYNCHRONOUS)
    end = steps(tmp_path / "half")[-1]
    run(sequential, 1, tmp_path / "full", resume=end, updates=0, **SYNCHRONOUS)
    saved = checkpoint.read_manifest(steps(tmp_path / "full")[0])
    assert saved.state["loss_scale"] == {"enabled": False, "value": 1.0, "good_updates": 0}


# What does not fit


def alone(work: Callable[[Pipeline], Any], tiny: models.Example, optimizer: str = "adamw") -> Any:
    """A pipeline of one rank, for what has nothing to do with the number of ranks."""
    model, batch, loss_fn = tiny

    def on_rank(world: Any) -> Any:
        with Pipeline(
            model, batch, optimizer=OPTIMIZERS[optimizer], loss_fn=loss_fn, minibatches=1, world=world
        ) as pipe:
            return work(pipe)

    return run_ranks(1, on_rank)[0]


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints side by side."""
    directory = tmp_path_factory.mktemp("runs")
    tiny = example("sequential", layers=2)

    def work(pipe: Pipeline) -> None:
        for _ in range(2):
            for _ in pipe.train([tiny[1]]):
                pass
            checkpoint.save(pipe, directory, {"position": pipe.updates})

    alone(work, tiny)
    return directory


@pytest.fixture
def saved(two_steps: Path, tmp_path: Path) -> Path:
    """A copy of them that may be damaged."""
    return Path(shutil.copytree(two_steps, tmp_path / "runs"))


def test_another_model_is_refused(saved: Path) -> None:
    path, tiny = saved / "step-00000002", example("sequential", layers=2)
    with pytest.raises(VPipeError, match=r"tensor '11.bias' of the model is in no file of the checkpoint"):
        alone(lambda pipe: checkpoint.load(pipe, path), example("sequential", layers=3))
    with pytest.raises(VPipeError, match=r"stage-000.safetensors: tensor '3.bias' is not one of the model's"):
        alone(
            lambda pipe: checkpoint.load(pipe, path), (nn.Sequential(nn.Linear(12, 24)).double(), *tiny[1:])
        )
    model, _, _ = models.sequential(layers=2)
    model[0], model[3] = nn.Linear(12, 16), nn.Linear(16, 24)
    with pytest.raises(
        VPipeError,
        match=r"stage-000.safetensors: tensor '0.bias' has the shape \[24\] and the model's has \[16\]",
    ):
        alone(lambda pipe: checkpoint.load(pipe, path), (model.double(), *tiny[1:]))


def test_another_optimizer_is_refused(saved: Path) -> None:
    with pytest.raises(VPipeError, match="was saved by optimizer AdamW and this run has SGD"):
        alone(
            lambda pipe: checkpoint.load(pipe, saved / "step-00000002"),
            example("sequential", layers=2),
            "sgd",
        )


def test_loading_inside_a_loop_is_refused(saved: Path) -> None:
    tiny = example("sequential", layers=2)

    def work(pipe: Pipeline) -> None:
        for _ in pipe.train([tiny[1]] * 2):
            checkpoint.load(pipe, saved / "step-00000002")

    with pytest.raises(VPipeError, match="inside a `train` loop"):
        alone(work, tiny)


# What is damaged


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest as somebody would who knows how its hash is made."""
    content = json.loads((path / "manifest.json").read_text())
    del content["sha256"]
    change(content)
    content["sha256"] = manifest._hash(content)
    (path / "manifest.json").write_text(json.dumps(content))


def rename_file(name: str) -> Callable[[Path], None]:
    return lambda path: rewrite(path, lambda c: c.update(files={name: next(iter(c["files"].values()))}))


def flip_bit(path: Path) -> None:
    file = path / "stage-000.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 4
    file.write_bytes(raw)


def make_link(path: Path) -> None:
    file = path / "stage-000.safetensors"
    shutil.move(file, path.parent / "elsewhere")
    file.symlink_to(path.parent / "elsewhere")


def change_rate(path: Path) -> None:
    file = path / "manifest.json"
    changed = file.read_text().replace('"lr": 0.001', '"lr": 0.002')
    assert changed != file.read_text()
    file.write_text(changed)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (
        lambda p: (p / "stage-000.safetensors").open("r+").truncate(99),
        "it has 99 bytes and should",
    ),
    "empty": (lambda p: (p / "stage-000.safetensors").write_bytes(b""), "it has 0 bytes and should have"),
    "missing": (lambda p: (p / "stage-000.safetensors").unlink(), "stage-000.safetensors is missing"),
    "flipped": (flip_bit, r"stage-000.safetensors is damaged: its hash is not the one in manifest.json"),
    "another step's": (
        lambda p: shutil.copy(p.parent / "step-00000001/stage-000.safetensors", p),
        "stage-000.safetensors is damaged: its hash",
    ),
    "linked": (make_link, "stage-000.safetensors is a symbolic link"),
    "way up": (rename_file("../stage-000.safetensors"), r"files.*'../stage-000.safetensors'"),
    "absolute": (rename_file("/etc/stage-000.safetensors"), "files.*'/etc/stage-000.safetensors'"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "has no manifest.json"),
    "half a manifest": (lambda p: (p / "manifest.json").open("r+").truncate(200), "manifest.json is damaged"),
    "changed manifest": (change_rate, "manifest.json was changed or damaged"),
    "no UTF-8": (lambda p: (p / "manifest.json").write_bytes(b"\xff\xfe"), "manifest.json is damaged"),
    "a list": (lambda p: (p / "manifest.json").write_text("[]"), "is not the manifest of a checkpoint"),
    "the future": (lambda p: rewrite(p, lambda c: c.update(version=2)), "has format version 2"),
    "negative size": (lambda p: rewrite(p, lambda c: c.update(updates=-1)), "updates: .* but it is -1"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_and_the_one_before_is_used(saved: Path, name: str) -> None:
    damage, message = DAMAGE[name]
    path = saved / "step-00000002"
    damage(path)
    with pytest.raises(VPipeError, match=message):
        checkpoint.verify(path)
    with pytest.raises(VPipeError, match=message):
        alone(lambda pipe: checkpoint.load(pipe, path), example("sequential", layers=2))
    reports: list[str] = []
    assert checkpoint.newest(saved, reports.append) == saved / "step-00000001"
    assert len(reports) == 1
    assert str(path) in reports[0]


def test_what_is_no_checkpoint_at_all(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path / "nowhere") is None
    assert checkpoint.newest(tmp_path) is None
    with pytest.raises(VPipeError, match="there is no checkpoint at"):
        checkpoint.verify(tmp_path / "nowhere")
    pickled = tmp_path / "model.pt"
    torch.save({"a": torch.ones(1)}, pickled)
    with pytest.raises(VPipeError, match=r"model.pt is a file: a checkpoint is a folder"):
        checkpoint.verify(pickled)


# The directory


def test_leftovers_of_crashes_are_not_seen_and_pruned(saved: Path) -> None:
    shutil.copytree(saved / "step-00000002", saved / ".step-00000003.tmp-ab12")
    shutil.copytree(saved / "step-00000001", saved / ".step-00000001.old-ab12")
    assert checkpoint.newest(saved) == saved / "step-00000002"
    deleted = checkpoint.prune(saved, keep=1)
    assert {path.name for path in saved.iterdir()} == {"step-00000002"}
    assert len(deleted) == 3


def test_one_that_was_moved_aside_counts_until_its_successor_is_there(saved: Path) -> None:
    aside = (saved / "step-00000002").rename(saved / ".step-00000002.old-ab12")
    assert checkpoint.newest(saved) == aside
    checkpoint.prune(saved, keep=1)
    assert [path.name for path in saved.iterdir()] == [aside.name]


def test_damaged_ones_do_not_count_as_kept(saved: Path) -> None:
    (saved / "step-00000002" / "stage-000.safetensors").unlink()
    assert checkpoint.prune(saved, keep=1) == []
    with pytest.raises(VPipeError, match="keep is 0"):
        checkpoint.prune(saved, keep=0)


# Saving


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
    """What each of two ranks is told when it saves; training then goes on."""
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
    def is_full(path: Path) -> bool:
        return path.name == ("manifest.json" if moment == "commit" else "stage-001.safetensors")

    def refuse(path: Path) -> None:
        if is_full(path):
            raise OSError(errno.ENOSPC, "No space left on device")

    save_file, sync = files.save_file, files.sync
    if moment == "write":
        monkeypatch.setattr(files, "save_file", lambda t, path, m: refuse(path) or save_file(t, path, m))
    monkeypatch.setattr(files, "sync", lambda path: refuse(path) or sync(path))
    monkeypatch.setattr(manifest, "sync", lambda path: refuse(path) or sync(path))
    before = sorted(saved.rglob("*"))
    messages = failures_of_saving(saved, {})
    assert all("No space left on device" in message for message in messages)
    assert any("stopped because rank" in message for message in messages)
    assert sorted(saved.rglob("*")) == before


def test_a_file_in_the_directorys_place(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    messages = failures_of_saving(tmp_path / "runs", {})
    assert all("cannot make" in message for message in messages)


def test_extra_must_be_json(tmp_path: Path) -> None:
    messages = failures_of_saving(tmp_path, {"config": {1, 2}})
    assert all("must be what JSON can hold" in message for message in messages)
    assert list(tmp_path.iterdir()) == []


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(extra=st.dictionaries(st.text(), json_values, max_size=4), updates=st.integers(0, 10**12))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_manifest_is_read_as_it_was_written(tmp_path: Path, extra: dict[str, Any], updates: int) -> None:
    entry = FileEntry(size=3, sha256="0" * 64, tensors=["model.a"])
    written = Manifest(
        updates=updates, layout={}, files={"stage-000.safetensors": entry}, state=extra, extra=extra
    )
    manifest.write_manifest(tmp_path, written)
    assert checkpoint.read_manifest(tmp_path) == written
