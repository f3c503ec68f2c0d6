"""`vpipe blocks`, as users call it."""

import json
import sys
from pathlib import Path

import pytest

from vpipe.cli import main

CONFIG = """
hidden_size: 16
num_layers: 2
num_heads: 2
vocab_size: 32
sequence_length: 8
batch_size: 3
"""


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["vpipe", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yml"
    path.write_text(CONFIG)
    return path


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], config: Path) -> None:
    assert run(monkeypatch, "blocks", config, "--json") == 0
    described = json.loads(capsys.readouterr().out)
    blocks = described["blocks"]
    assert described["model"] == "BertForMaskedLM"
    assert [block["index"] for block in blocks] == list(range(5))
    # Between half layers only the residual stream crosses: 3 samples, 8 tokens, 16 numbers of 4 bytes.
    assert [block["cut_bytes"] for block in blocks] == [3 * 8 * 16 * 4] * 4 + [0]
    embedding = 32 * 16
    assert sum(block["parameters"] for block in blocks) == described["parameters"] + embedding
    assert blocks[1]["name"] == "bert.encoder.layer.0/intermediate+output"
    assert blocks[1]["parameters"] == 16 * 64 + 64 + 64 * 16 + 16 + 2 * 16


def test_half_precision_halves_the_bytes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], config: Path
) -> None:
    config.write_text(CONFIG + "precision: bf16\n")
    assert run(monkeypatch, "blocks", config) == 0
    table = capsys.readouterr().out
    assert "BertForMaskedLM: 5 blocks, minibatches of 3 x 8 tokens" in table
    assert "bert.encoder.layer.1.attention" in table
    assert table.count(" 768 ") == 4


@pytest.mark.parametrize("command", ["blocks", "verify"])
def test_mistakes_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    path = tmp_path / "run.yml"
    path.write_text("num_layer: 2")
    assert run(monkeypatch, command, path) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert (
        captured.err
        == f"error: {path}: unknown key 'num_layer' (its value is 2): did you mean 'num_layers'?\n"
    )
