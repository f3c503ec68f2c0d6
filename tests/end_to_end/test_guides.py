"""The guides' files, typed as they print them, with the sizes of a small model: they train on CPU ranks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.end_to_end.command import vpipe
from tests.end_to_end.test_train import only_run
from tests.end_to_end.tiny import MODEL

ROOT = Path(__file__).parents[2]
PRINTED = {
    "directory": "bert",
    "module": "vgpus=4",
    "partition": "vgpus=4/vpipe.json",
    "config_file": "vgpus=4/mp_conf.json",
    "machines": ["localhost:0", "localhost:1", "localhost:2", "localhost:3"],
    "sync_mode": "asp",
    "distributed_backend": "gloo",
    "model_type": "bert",
    "log_directory": "logs",
    "learning_rate": 0.03,
    "learning_rate_policy": "polynomial",
    "weight_decay": 0.01,
    "epochs": 2,
    "print_frequency": 100,
    "verbose_frequency": 0,
}
SMALL = {**MODEL, "synthetic_data": True, "max_updates": 6, "timeout": 600, "heartbeat_limit": 60}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """`configs/`, and beside it the folder of the model with its maps, as in the guides."""
    files = tmp_path / "bert" / "vgpus=4"
    files.mkdir(parents=True)
    (tmp_path / "configs").mkdir()
    plan = {"partition": [1, 2, 1, 1], "recompute_ratio": [0.3, 0, 0, 0]}
    (files / "vpipe.json").write_text(json.dumps(plan))
    maps = {
        "module_to_stage_map": [0, 1, 1, 2, 3],
        "stage_to_rank_map": {str(rank): [rank] for rank in range(4)},
        "stage_to_depth_map": {"0": 0, "1": 2, "2": 4, "3": 6},
    }
    (files / "mp_conf.json").write_text(json.dumps(maps))
    (tmp_path / "configs" / "run.yml").write_text(yaml.safe_dump(PRINTED | SMALL))
    return tmp_path


def test_the_guides_files_train(project: Path) -> None:
    ended = vpipe("train", "configs/run.yml", cwd=project)
    assert ended.code == 0, ended.said
    assert "4 CPU ranks (there is no GPU here: those of `machines` are not used), schedule vpipe" in ended.out
    (turned,) = [line for line in ended.err.splitlines() if "stage_to_depth_map" in line]
    assert "the wrong way round" in turned
    run = only_run(project, "logs")
    for rank in range(4):
        lines = (run / f"output.log.{rank}").read_text().splitlines()
        expected = (
            f"Finished initializing process group; backend: gloo, rank: {rank}, world_size: 4",
            f"[Rank {rank}] Stage: {rank}, Rank in stage: 0",
            "Training...",
            "Epoch 0, Iteration 0, Loss: ",
        )
        found = [n for text in expected for n, line in enumerate(lines) if line.startswith(text)]
        assert len(found) == len(expected)
        assert found == sorted(found)
    assert yaml.safe_load((run / "config.yml").read_text())["depth"] == [6, 4, 2, 0]


def test_driver(project: Path) -> None:
    command = [sys.executable, ROOT / "driver.py", "--config_file", "configs/run.yml", "--print-config"]
    ended = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=200, check=True)
    assert yaml.safe_load(ended.stdout)["partition"] == [1, 2, 1, 1]
