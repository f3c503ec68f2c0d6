"""The example of README.md, and the commands of all pages for users."""

import re
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.end_to_end.command import vpipe
from tests.pages import ROOT, blocks, read_page
from vpipe import cli

README, COMMANDS, TUTORIAL, INSTALL, HOWTO = map(
    read_page, ("README.md", "docs/commands.md", "docs/tutorial.md", "docs/install.md", "docs/howto.md")
)


def commands() -> list[list[str]]:
    """The lines that begin with `vpipe` (after a prompt, if there is one), each once and without its comment."""
    pages = (README, COMMANDS, TUTORIAL, INSTALL)
    found = [line for page in pages for block in blocks("", page) for line in block.splitlines()]
    found += re.findall(r"`(vpipe [^`]*)`", HOWTO)
    lines = [line.removeprefix("$ ").partition("#")[0].strip() for line in found]
    return [shlex.split(line) for line in dict.fromkeys(lines) if line.startswith("vpipe ")]


@pytest.mark.long
def test_the_example_trains_as_pasted(tmp_path: Path) -> None:
    """In new interpreters, started as the README says; the weights that it saves are those of its model."""
    (script,) = blocks("python", README)
    (tmp_path / "train.py").write_text(script)
    assert "`torchrun --nproc-per-node 2 train.py`" in README
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    ended = vpipe("train.py", cwd=tmp_path, launcher=launcher)
    assert ended.code == 0, ended.said
    # Both ranks write to one pipe, so two lines may be mixed: each text comes whole, its end of line may not.
    trained = [float(loss) for loss in re.findall(r"update \d+, loss (\d\.\d{3})", ended.out)]
    evaluated = dict(re.findall(r"rank (\d): evaluation loss (\d\.\d{3})", ended.out))
    assert len(trained) == 3
    assert trained == sorted(trained, reverse=True)
    assert evaluated.keys() == {"0", "1"}
    assert evaluated["0"] == evaluated["1"]  # every rank reads it
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert plain_loss(script, weights) == pytest.approx(float(evaluated["0"]), abs=0.001)


def plain_loss(script: str, weights: dict[str, torch.Tensor]) -> float:
    """The loss of the script's plain model with these weights, on the minibatches that the script evaluates."""
    names: dict[str, Any] = {}
    exec(script[: script.index("pipe = vpipe.Pipeline(")], names)
    model = names["ByteModel"]()
    model.load_state_dict(weights)
    model.eval()
    with torch.no_grad():
        return statistics.mean(model(**batch).item() for batch in names["minibatches"](8, seed=2))


def test_the_drawing_is_the_commands_output(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    block = next(block for block in blocks("", README) if block.startswith("$ vpipe schedule"))
    command, *shown = block.splitlines()
    monkeypatch.setattr(sys, "argv", shlex.split(command.removeprefix("$ ")))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert shown[-1] == "..."
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert printed[: len(shown) - 1] == [line.rstrip() for line in shown[:-1]]


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_every_command_exists_with_its_options_and_files(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["vpipe", command[1], "--help"])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    reported = capsys.readouterr().out
    for part in command[2:]:
        if part.startswith("--"):
            assert part in reported
        elif part.startswith("configs/"):
            assert (ROOT / part).is_file()


def test_every_target_of_make_is_there() -> None:
    rules = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:^|^\$ |`)make ([\w-]+)", README + COMMANDS + INSTALL, re.MULTILINE):
        assert f"\n{target}:" in rules
