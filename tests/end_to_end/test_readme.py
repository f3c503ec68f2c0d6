"""What the README shows is what happens."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.end_to_end.command import vpipe
from vpipe import cli

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()

PRELUDE = """
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))

    def forward(self, x, y):
        return nn.functional.mse_loss(self.layers(x), y)


model = Model()
example_batch = (torch.randn(4, 8), torch.randn(4, 4))
loader = batches = [example_batch] * 6
"""


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language."""
    parts = re.split(
        r"^```(\w*)\n", README, flags=re.MULTILINE
    )  # text, language, block, "", text, language ...
    return [block for found, block in zip(parts[1::4], parts[2::4], strict=True) if found == language]


def commands() -> list[list[str]]:
    """The lines that begin with `vpipe`, and those behind a prompt, without what is said beside them."""
    lines = [line.removeprefix("$ ") for block in blocks("") for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("vpipe ")]


def test_the_snippet_trains_under_torchrun(tmp_path: Path) -> None:
    """A script of the user's own in new interpreters, started as the README says."""
    (snippet,) = blocks("python")
    # In one piece: both ranks write to the same pipe.
    told = 'print(f"{pipe.rank} {step} {loss!r}\\n", end="", flush=True)'
    script = tmp_path / "script.py"
    script.write_text(PRELUDE + snippet.replace("    ...", f"    {told}"))
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    ended = vpipe(script, cwd=tmp_path, launcher=launcher)
    assert ended.code == 0, ended.said
    lines = [line.split() for line in ended.out.splitlines()]
    first, second = ([(step, loss) for rank, step, loss in lines if rank == which] for which in "01")
    assert first == second  # every rank reads them
    assert [step for step, _ in first] == list("012345")
    assert float(first[-1][1]) < float(first[0][1])


def test_the_drawing_is_the_commands_output(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    block = next(block for block in blocks("") if block.startswith("$ vpipe schedule"))
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
    told = capsys.readouterr().out
    for part in command[2:]:
        if part.startswith("--"):
            assert part in told
        elif part.endswith(".yml"):
            assert (ROOT / part).is_file()


def test_every_target_of_make_is_there() -> None:
    rules = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^(?:\$ )?make (\w+)", README, re.MULTILINE):
        assert f"\n{target}:" in rules
