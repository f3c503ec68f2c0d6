"""`vpipe converge` gives the losses of the real pipeline."""

import json
from pathlib import Path

import pytest

from tests.end_to_end.command import vpipe

RUN = """
hidden_size: 16
num_layers: 2
num_heads: 2
vocab_size: 64
sequence_length: 16
batch_size: 2
dropout: 0.1
synthetic_data: true
schedule: vpipe
staleness: [predict, {async_after: 2}]
optimizer: muon
learning_rate: 1e-2
stages: 2
max_updates: 12
print_frequency: 1
"""


@pytest.mark.long
def test_its_losses_are_those_of_ranks_that_are_processes(tmp_path: Path) -> None:
    (tmp_path / "run.yml").write_text(RUN)
    vpipe("train", "run.yml", cwd=tmp_path)
    (summary,) = (tmp_path / "runs").glob("*/summary.json")
    trained = [loss for _, loss in json.loads(summary.read_text())["losses"]]
    arguments = ("run.yml", "--schedules", "vpipe", "--updates", "12", "--json")
    (row,) = json.loads(vpipe("converge", *arguments, cwd=tmp_path).out)
    assert row["losses"][0] == pytest.approx(trained, rel=1e-5)
    assert row["staleness"] == [1, 0]
    assert (tmp_path / "runs/converge-run.png").is_file()


@pytest.mark.long
def test_runs_at_the_same_time_are_the_same_runs(tmp_path: Path) -> None:
    (tmp_path / "run.yml").write_text(RUN)
    arguments = ("run.yml", "--schedules", "vpipe,1f1b:2", "--updates", "4", "--seeds", "2", "--json")
    one, two = (
        json.loads(vpipe("converge", *arguments, "--jobs", jobs, cwd=tmp_path).out) for jobs in (1, 2)
    )
    assert one == two
    assert one[0]["losses"][0] != one[0]["losses"][1]
    failed = vpipe(
        "converge", *arguments, "--jobs", 2, "--set", "vocab_size=8", "--set", "num_heads=3", cwd=tmp_path
    )
    assert failed.code == 2
    assert "Traceback" not in failed.said
