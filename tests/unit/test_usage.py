"""Mistakes on the command line: one plain line and exit code 2."""

import sys

import pytest

from vpipe.cli import main

MISTAKES = {
    "train run.yml --set": ("--set", "requires an argument", "--help`"),
    "train": ("missing argument", "`vpipe train --help`"),
    "trian run.yml": ("no such command", "trian"),
    "train run.yml --nosuch": ("no such option", "--nosuch", "`vpipe train --help`"),
    "plan --ranks two": ("--ranks", "integer", "`vpipe plan --help`"),
    "train run.yml other.yml": ("unexpected extra argument", "other.yml", "`vpipe train --help`"),
    "checkpoint prune run": ("missing option", "--keep", "`vpipe checkpoint prune --help`"),
}


def said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["vpipe", *command.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out, printed.err


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    code, out, err = said(monkeypatch, capsys, command)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    for words in MISTAKES[command]:
        assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "code"), [("", 2), ("checkpoint", 2), ("--help", 0), ("train --help", 0)]
)
def test_help_is_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, code: int
) -> None:
    found, out, err = said(monkeypatch, capsys, command)
    assert found == code
    assert (out + err).count("Usage: vpipe") == 1
    assert "error:" not in err
