"""Checkpoints that do not fit a run, or are damaged: refused by name, and the one before is used."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import models
from tests.checkpoints import alone, rewrite
from tests.examples import example
from vpipe import Pipeline, checkpoint
from vpipe.errors import VPipeError
from vpipe.weights.optimizer_state import read_state, write_state

pytestmark = pytest.mark.usefixtures("capture_once")


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


def test_state_that_belongs_to_no_group_is_named() -> None:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    names = {parameter: name for name, parameter in layer.named_parameters()}
    _, record = read_state(optimizer, None, names)
    record["groups"][0]["parameters"].remove("weight")
    with pytest.raises(VPipeError, match="state of parameter 'weight' belongs to no group of any record"):
        write_state(optimizer, None, names, {"weight.exp_avg": torch.zeros(2, 2)}, [record])


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
