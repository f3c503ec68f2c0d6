"""`vpipe verify`, as users call it."""

import json
import sys
from pathlib import Path

import pytest

from tests.announced import besides_announcements
from vpipe.cli import main
from vpipe.stage import Stage

CONFIG = """
hidden_size: 16
num_layers: 1
num_heads: 2
vocab_size: 32
sequence_length: 8
batch_size: 2
stages: 2
minibatches: 2
learning_rate: 1e-3
partition: [1, 2]
"""


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["vpipe", "verify", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


@pytest.fixture
def config(tmp_path: Path, capture_once: None) -> Path:
    path = tmp_path / "run.yml"
    path.write_text(CONFIG)
    return path


def test_the_config_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], config: Path
) -> None:
    assert run(monkeypatch, config) == 0
    out = capsys.readouterr().out
    assert "schedule 1f1b, partition [1, 2], 2 ranks, 5 updates of 2 minibatches" in out
    assert (
        out.splitlines()[-1] == "equal: the pipeline trains as the plain model does, within 1e-09 (float64)"
    )


def test_another_schedule_in_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], config: Path
) -> None:
    options = ("--set", "optimizer=adamw", "--dtype", "float32", "--json")
    assert run(monkeypatch, config, "--schedule", "pipedream", *options) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["schedule"], result["dtype"], result["bound"], result["ok"]) == (
        "pipedream",
        "float32",
        1e-5,
        True,
    )
    assert result["updates"] == 5 + 2
    assert all(result[what]["where"] for what in ("loss", "gradients", "weights"))


def test_a_wrong_pipeline_exits_with_one_and_names_the_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], config: Path
) -> None:
    right = Stage.backward

    def wrong(stage: Stage, minibatch: int, seed: float) -> object:
        gradients = right(stage, minibatch, seed)
        return {name: gradient * 1.001 for name, gradient in gradients.items()}

    monkeypatch.setattr(Stage, "backward", wrong)
    assert run(monkeypatch, config, "--updates", 2) == 1
    verdict = capsys.readouterr().out.splitlines()[-1]
    assert verdict.startswith("DIFFERENT: gradients by 1.0e-03 at bert.")
    assert verdict.endswith("(stage 0, rank 0), more than 1e-09 (float64)")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--schedule", "gpip"], "unknown schedule 'gpip': did you mean 'gpipe'?"),
        (["--schedule", "nowhere.csv"], "nowhere.csv: cannot be read: No such file"),
        (["--dtype", "int8"], "dtype is 'int8': choose from float64, float32"),
        (["--updates", "0"], "updates is 0"),
        (["--schedule", "vpipe", "--dtype", "float32"], "optimizer muon computes in bfloat16 inside"),
    ],
)
def test_mistakes_are_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    config: Path,
    arguments: list[str],
    message: str,
) -> None:
    assert run(monkeypatch, config, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = besides_announcements(captured.err)
    assert line.startswith("error: ")
    assert message in line
