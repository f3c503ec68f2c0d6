"""The README's way to start: a script of the user's own under a real torchrun."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SCRIPT = """
from pathlib import Path

import torch
import vpipe

torch.manual_seed(0)
layers = [torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout(0.1)) for _ in range(6)]
model = torch.nn.Sequential(*layers)
example_batch = (torch.randn(8, 16), torch.randn(8, 16))
loader = [example_batch] * 10
batches = [example_batch] * 3

pipe = vpipe.Pipeline(
    model,
    example_batch,
    stages=2,
    schedule="pipedream",
    optimizer=lambda params: torch.optim.AdamW(params, 1e-3),
    loss_fn=torch.nn.functional.mse_loss,
)
before = pipe.evaluate(batches)
losses = []
for step, loss in pipe.train(loader):
    losses.append((step, loss))
after = pipe.evaluate(batches)
assert [step for step, _ in losses] == list(range(10)), losses
assert after < before, (before, after)
Path(__file__).with_name(f"rank{pipe.rank}").write_text(f"{losses} {after}")
"""


@contextmanager
def started(command: list[str]) -> Iterator["subprocess.Popen[str]"]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            # Politely first: torchrun ends its workers, which lead sessions of their own.
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(15)
            finally:
                process.kill()
                process.wait()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.timeout(120)
def test_a_script_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    torchrun = Path(sys.executable).with_name("torchrun")
    command = [str(torchrun), "--nproc-per-node", "2", "--master-port", str(free_port()), str(script)]
    with started(command) as process:
        output, _ = process.communicate(timeout=90)
    assert process.returncode == 0, output
    said = {path.name: path.read_text() for path in tmp_path.glob("rank*")}
    assert said.keys() == {"rank0", "rank1"}, output
    assert said["rank0"] == said["rank1"]
