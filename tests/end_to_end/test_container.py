"""`container`: ranks inside an image, whoever started them; tests/apptainer.py stands in for Apptainer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import apptainer
from tests.end_to_end.command import vpipe
from tests.faults.runs import final_weights, write_config
from tests.waiting import TIMEOUT
from vpipe.config.file import read_config
from vpipe.errors import ConfigError
from vpipe.launch import place


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run with an image, data and code in folders of their own."""
    for name in ("work", "data", "configs"):
        (tmp_path / name).mkdir()
    (tmp_path / "image.sif").write_text("")
    keys = {"container": "../image.sif", "directory": "../work", "pretrained": "../data/weights"}
    write_config(tmp_path / "configs", 2, **keys)
    return tmp_path


def test_a_rank_of_another_launcher_enters_the_image(folder: Path) -> None:
    """The process stays the same, and the secret is in no argument."""
    found = apptainer.install(folder / "bin", run=False)
    rank = {"RANK": "1", "WORLD_SIZE": "2", "VPIPE_SECRET": "hidden", "TORCHELASTIC_RUN_ID": "none"}
    process = subprocess.Popen(
        [sys.executable, "-m", "vpipe", "train", "configs/run.yml", "--set", "epochs=2"],
        cwd=folder,
        env={**os.environ, **found, **rank},
    )
    assert process.wait(TIMEOUT) == 0
    (call,) = apptainer.calls(folder / "bin")
    assert call["process"] == process.pid
    assert call["secret"]
    assert call["image"] == str(folder / "image.sif")
    assert call["command"] == [
        *("python3", "-m", "vpipe", "train", str(folder / "configs/run.yml"), "--set", "epochs=2"),
        *("--set", f'log_directory="{folder / "runs"}"', "--set", f'directory="{folder / "work"}"'),
    ]
    assert call["pwd"] == [str(folder / "work")]
    assert call["bind"] == [str(folder)]  # the current directory, which all others are inside of
    assert (folder / "runs").is_dir()


@pytest.mark.parametrize("gpus", [0, 2])
def test_the_image_sees_data_code_and_runs(folder: Path, gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", apptainer.install(folder / "bin")["PATH"])
    monkeypatch.setattr(place, "count_gpus", lambda: gpus)
    monkeypatch.chdir(folder / "work")
    (folder / "work/runs").mkdir()
    config = read_config(folder / "configs/run.yml")
    command = place.rank_interpreter(config, ["train", str(folder / "configs/run.yml")])
    bound = [command[n + 1] for n, word in enumerate(command) if word == "--bind"]
    assert bound == [str(folder), *()] or bound == [
        str(folder / name) for name in ("configs", "data", "work")
    ]
    assert ("--nv" in command) == bool(gpus)
    assert command[-2:] == [str(folder / "image.sif"), "python3"]


@pytest.mark.parametrize("name", ["a:b", "a,b"])
def test_a_folder_that_cannot_be_bound_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", apptainer.install(tmp_path / "bin")["PATH"])
    (tmp_path / name).mkdir()
    (tmp_path / name / "image.sif").write_text("")
    write_config(tmp_path / name, 2, container="image.sif")
    config = read_config(tmp_path / name / "run.yml")
    with pytest.raises(ConfigError, match="a path with ':' or ',' cannot be bound"):
        place.rank_interpreter(config, [])


@pytest.mark.long  # the commands are compared above
def test_training_in_a_container_is_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of our launcher and of torchrun; the weights are those of a run without an image."""
    (tmp_path / "image.sif").write_text("")
    monkeypatch.setenv("PATH", apptainer.install(tmp_path / "bin")["PATH"])
    weights = []
    for keys, launcher in (
        ({}, ()),
        ({"container": "image.sif"}, ()),
        (
            {"container": "image.sif"},
            ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "vpipe"),
        ),
    ):
        write_config(tmp_path, 2, max_updates=4, heartbeat_limit=600.0, **keys)
        ended = vpipe("train", "run.yml", cwd=tmp_path, new=bool(keys), launcher=launcher)
        assert ended.code == 0, ended.said
        weights.append(final_weights(max((tmp_path / "runs").glob("2*"))))
    assert weights[0] == weights[1] == weights[2]
    assert [call["rank"] for call in apptainer.calls(tmp_path / "bin")] == ["0", "0", "1", "1"]
