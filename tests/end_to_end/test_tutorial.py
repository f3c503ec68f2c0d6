"""The tutorial: every drawing, file and command of it, in order and as pasted."""

import glob
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.end_to_end.command import Ended, vpipe
from tests.pages import ROOT, blocks, fenced, read_page
from vpipe import cli

PAGE = read_page("docs/tutorial.md")
FILES = re.findall(r"[Ss]ave this as `([\w.]+)`", PAGE)
"""The names of the files that a reader saves; their contents are the python and yaml blocks, in order."""


def commands() -> list[str]:
    return [
        line
        for block in blocks("", PAGE)
        for line in block.splitlines()
        if re.match("vpipe |torchrun ", line)
    ]


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str) -> list[str]:
    """The lines that a command prints, in this process."""
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def save_files(folder: Path) -> None:
    contents = [block for language, block in fenced(PAGE) if language in ("python", "yaml")]
    for name, text in zip(FILES, contents, strict=True):
        (folder / name).write_text(text)


def test_every_drawing_is_its_commands_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in commands():
        if "--svg" in command:
            run(monkeypatch, capsys, command)
    shown = re.findall(r"\]\(drawings/([\w-]+\.svg)\)", PAGE)
    assert sorted(shown) == sorted(path.name for path in tmp_path.iterdir())
    for name in shown:
        assert (tmp_path / name).read_text() == (ROOT / "docs/drawings" / name).read_text(), name


def test_what_commands_print_is_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (with_prompt,) = [block for block in blocks("", PAGE) if block.startswith("$ ")]
    command, *shown = with_prompt.splitlines()
    assert run(monkeypatch, capsys, command.removeprefix("$ ")) == shown
    save_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    table, _ = blocks("text", PAGE)
    assert run(monkeypatch, capsys, "vpipe blocks run.yml") == table.splitlines()


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_commands_as_pasted(tmp_path: Path) -> None:
    save_files(tmp_path)
    said = {command: pasted(command, tmp_path) for command in commands() if "--svg" not in command}
    for command, ended in said.items():
        assert ended.code == 0, f"{command}: {ended.said}"
    equal = blocks("text", PAGE)[1].strip()
    assert equal in said["vpipe verify run.yml --schedule zb-v"].out
    assert "9 blocks as [4, 5] on 2 CPU ranks" in said["vpipe train run.yml"].out
    assert "report.html" in said["vpipe report runs/*"].out
    assert "recomputed" in said["vpipe plan run.yml --memory 6MiB"].out
    (script,) = (ended.out for command, ended in said.items() if command.startswith("torchrun"))
    losses = [float(loss) for loss in re.findall(r"update \d+, loss (\d\.\d{3})", script)]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 6
    assert len(list((tmp_path / "runs/script/checkpoints").iterdir())) == 1
    assert (tmp_path / "runs/script/report.html").is_file()


def pasted(command: str, folder: Path) -> Ended:
    """The command in this folder, with `*` as a shell reads it; ranks of torchrun are new interpreters."""
    program, *arguments = shlex.split(command)
    if program == "torchrun":
        launcher = ("torch.distributed.run", "--standalone", *arguments[:-1])
        return vpipe(arguments[-1], cwd=folder, launcher=launcher)
    found = [sorted(glob.glob(part, root_dir=folder)) if "*" in part else [part] for part in arguments]
    return vpipe(*(part for parts in found for part in parts), cwd=folder, timeout=300)
