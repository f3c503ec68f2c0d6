"""Two ranks on one card that they know by different names: its index, its UUID. They share it by MPS, over CUDA IPC."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.end_to_end.tiny import TINY
from vpipe import Pipeline
from vpipe.launch import mps

ROOT = Path(__file__).parents[2]
PACKAGES = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
LIMIT = 200.0
"""Seconds that only a hang reaches."""
NAMES = ("index", "uuid")


def name_of(how: str) -> str:
    return "0" if how == "index" else f"GPU-{torch.cuda.get_device_properties(0).uuid}"


@pytest.mark.parametrize("how", NAMES)
def test_a_run_on_the_visible_card(how: str, tmp_path: Path) -> None:
    """By the launcher, which starts MPS where it is installed."""
    run = TINY | {"machines": ["localhost:0", "localhost:0"], "synthetic_data": True, "max_updates": 8}
    del run["data_dir"]
    (tmp_path / "run.yml").write_text(json.dumps(run))  # JSON is YAML
    done = subprocess.run(
        [sys.executable, "-m", "vpipe", "train", "run.yml"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": PACKAGES, mps.VISIBLE: name_of(how)},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    logs = [path.read_text() for path in tmp_path.glob("runs/*/output.log.*")]
    assert "joined by CUDA IPC" in "".join([done.stdout, done.stderr, *logs])


def test_ranks_that_know_their_card_by_different_names() -> None:
    """As a scheduler may show it: to one by its index, to the other by its UUID; the first sees it as number 0 too."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with mps.sharing([0, 0]) as shares:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.gpu.test_visible_devices"],
                cwd=ROOT,
                env={
                    **os.environ,
                    **share,
                    "PYTHONPATH": PACKAGES,
                    mps.VISIBLE: name_of(how),
                    "RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                },
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, (how, share) in enumerate(zip(NAMES, shares, strict=True))
        ]
        try:
            found = [json.loads(rank.communicate(timeout=LIMIT)[0].splitlines()[-1]) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    assert [one["channels"] for one in found] == [["CUDA IPC"]] * 2
    assert found[0]["losses"] == found[1]["losses"]
    assert len(found[0]["losses"]) == 4


def train() -> dict[str, list[float] | list[str]]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64) for _ in range(4)]
    batch = (torch.randn(8, 64), torch.randn(8, 64))
    with Pipeline(
        torch.nn.Sequential(*layers),
        batch,
        loss_fn=torch.nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        minibatches=4,
        timeout=100.0,
    ) as pipe:
        losses = [loss for _, loss in pipe.train([batch] * 16)]
        return {"losses": losses, "channels": list(pipe.handler.channel_names.values())}


if __name__ == "__main__":
    print(json.dumps(train()))
