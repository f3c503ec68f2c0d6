"""Paths that no file system has, that lead nowhere or that are not ours: one line from every command and every key."""

import ctypes
import importlib
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.announced import besides_announcements
from tests.end_to_end.tiny import TINY
from vpipe.cli import main
from vpipe.config.settings import PATHS
from vpipe.data import read_documents, read_pairs, read_tokenizer
from vpipe.errors import NotWrittenError, VPipeError
from vpipe.train.save_policy import find_checkpoint

launching = importlib.import_module("vpipe.train.launcher")

LONG = "x" * 300
HOSTILE = {
    "too long": LONG,
    "too long below a folder": f"folder/{LONG}",
    "too deep": "/".join(["x" * 200] * 30),
    "in a circle": "round",
    "dangling": "dangling",
    "below a file": "file/below",
    "no permission": "locked/inside",
    "a fifo": "fifo",
    "a socket": "socket",
    "a device": "/dev/null",
    "escape codes": "no\x1b[31mwhere\nelse",
    "a surrogate": "no\udc80where",
}
SHORT = ("too long", "no permission", "a fifo")
"""These show what the others show again."""
KINDS = [kind if kind in SHORT else pytest.param(kind, marks=pytest.mark.long) for kind in HOSTILE]
NOT_IN_ARGUMENTS = {"zero byte": "no\0where", "a lone surrogate": "no\ud800where"}
"""A process cannot be given these."""


@contextmanager
def without_rights() -> Iterator[None]:
    """Root may look anywhere, by a capability: for a while this thread has none."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, before = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, before) == 0
    now = (ctypes.c_uint32 * 6)(*before)
    now[0] = now[3] = 0  # what holds; what may be had again stays
    assert libc.capset(header, now) == 0
    try:
        yield
    finally:
        assert libc.capset(header, before) == 0


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    Path("round").symlink_to("round")
    Path("dangling").symlink_to("nowhere")
    Path("folder").mkdir()
    Path("file").write_text("text")
    os.mkfifo("fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
    Path("locked").mkdir()
    Path("locked/inside").mkdir()
    os.chmod("locked", 0)
    Path("run.yml").write_text(yaml.safe_dump({"synthetic_data": True}))
    Path("plan.json").write_text('{"partition": [1]}')
    yield tmp_path
    os.chmod("locked", 0o700)


def refused(
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    code: int = VPipeError.exit_code,
) -> str:
    """The one line that the command says."""
    monkeypatch.setattr(sys, "argv", ["vpipe", *arguments])
    with pytest.raises(SystemExit) as ended, without_rights():
        main()
    said = capsys.readouterr()
    assert ended.value.code == code, said
    (line,) = besides_announcements(said.err)
    assert line.startswith("error: ")
    assert line.isprintable()
    return line


READING = {
    "train": ["train", "PATH"],
    "eval": ["eval", "PATH"],
    "compare": ["compare", "PATH"],
    "blocks": ["blocks", "PATH"],
    "verify": ["verify", "PATH"],
    "verify, a table": ["verify", "run.yml", "--schedule", "PATH.csv"],
    "profile": ["profile", "PATH"],
    "plan": ["plan", "PATH"],
    "plan, a profile": ["plan", "--profile", "PATH", "--ranks", "2"],
    "simulate, a profile": ["simulate", "--profile", "PATH", "--plan", "plan.json"],
    "schedule": ["schedule", "--from", "PATH"],
    "report": ["report", "PATH"],
    "top": ["top", "PATH", "--once"],
    "diagnose": ["diagnose", "PATH"],
    "checkpoint show": ["checkpoint", "show", "PATH"],
    "checkpoint verify": ["checkpoint", "verify", "PATH"],
    "checkpoint prune": ["checkpoint", "prune", "PATH", "--keep", "1"],
    "checkpoint export": ["checkpoint", "export", "PATH", "model"],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("command", READING)
def test_commands_that_read(
    command: str,
    kind: str,
    here: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused([a.replace("PATH", HOSTILE[kind]) for a in READING[command]], capsys, monkeypatch)


WRITING = {
    "schedule --csv": ["schedule", "gpipe", "--stages", "2", "--minibatches", "2", "--csv", "PATH"],
    "schedule --svg": ["schedule", "gpipe", "--stages", "2", "--minibatches", "2", "--svg", "PATH"],
    "report": ["report", "folder", "--output", "PATH"],
}


@pytest.mark.parametrize("kind", ["too long", "too deep", "in a circle", "below a file", "no permission"])
@pytest.mark.parametrize("command", WRITING)
def test_commands_that_write(
    command: str,
    kind: str,
    here: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = [a.replace("PATH", HOSTILE[kind]) for a in WRITING[command]]
    refused(arguments, capsys, monkeypatch, NotWrittenError.exit_code)


@pytest.mark.parametrize("kind", [*KINDS, *NOT_IN_ARGUMENTS])
@pytest.mark.parametrize("key", [*PATHS, "schedule", "log_directory"])
def test_keys(
    key: str, kind: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = {**HOSTILE, **NOT_IN_ARGUMENTS}[kind] + (".csv" if key == "schedule" else "")
    (here / "run.yml").write_text(
        yaml.safe_dump(TINY | {"data_dir": None, "synthetic_data": True, key: written})
    )
    if key == "model":
        refused(["blocks", "run.yml"], capsys, monkeypatch)
        return
    started: list[object] = []
    monkeypatch.setattr(launching, "run_ranks_here", lambda *args, **keys: started.append(args))
    monkeypatch.setattr(sys, "argv", ["vpipe", "train", "run.yml"])
    readable = key in ("data_dir", "tokenizer", "pretrained") and kind in ("a fifo", "a socket", "a device")
    new = key == "log_directory" and kind in ("escape codes", "a surrogate", "no permission")
    if readable or (new and kind != "no permission"):
        with pytest.raises(SystemExit) as ended:  # the ranks refuse it; such a folder may be made
            main()
        assert ended.value.code in (0, 2, None)
        assert "Traceback" not in capsys.readouterr().err
        return
    refused(["train", "run.yml"], capsys, monkeypatch)
    assert not started


@pytest.mark.parametrize("kind", [*HOSTILE, *NOT_IN_ARGUMENTS])
def test_what_ranks_read(kind: str, here: Path) -> None:
    """Data, a tokenizer, the checkpoint to resume from."""
    path = Path({**HOSTILE, **NOT_IN_ARGUMENTS}[kind])
    for read in (
        lambda: read_documents(path),
        lambda: read_pairs(path),
        lambda: read_tokenizer(path, 300),
        lambda: find_checkpoint(str(path), Path(), print),
    ):
        with pytest.raises(VPipeError) as caught, without_rights():
            read()
        assert str(caught.value).isprintable()


def test_a_folder_of_data_may_hold_what_is_no_text(here: Path) -> None:
    """Links that lead nowhere and FIFOs are left out; the names of the others are shown escaped."""
    (here / "data").mkdir()
    (here / "data" / "good.txt").write_text("words")
    (here / "data" / "dangling").symlink_to("nowhere")
    os.mkfifo(here / "data" / "fifo")
    assert read_documents(Path("data")) == ["words"]
    (here / "data" / "bad\x1b]0;title\x07\n.txt").write_bytes(b"\xff")
    with pytest.raises(VPipeError, match=r"bad\\x1b\]0;title\\x07\\n.txt is not UTF-8") as caught:
        read_documents(Path("data"))
    assert str(caught.value).isprintable()
