"""Every command says what it does before it imports torch, which takes seconds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.end_to_end.tiny import MODEL
from tests.waiting import TIMEOUT

PROGRAM = """
import io, json, sys

class Heard(io.StringIO):
    def write(self, text):
        if text.strip():
            found.setdefault("first", text.strip())
            found.setdefault("torch", "torch" in sys.modules)
        return super().write(text)

found = {}
sys.stderr = sys.stdout = Heard()

class Stop:  # whoever imports torch has said something, or never will
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise SystemExit(9)

sys.meta_path.insert(0, Stop())
sys.argv = ["vpipe", *sys.argv[1:]]
from vpipe.launch import local
def launched(*arguments, **options):
    raise SystemExit(8)  # in place of the ranks
local.subprocess.Popen = launched
try:
    from vpipe.cli import main
    main()
except BaseException as error:
    found["end"] = repr(error)
print(json.dumps(found), file=sys.__stdout__)
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yml"
    path.write_text(yaml.safe_dump(MODEL | {"synthetic_data": True, "stages": 2}))
    return path


COMMANDS = {
    "train run.yml": "run.yml: starting 2 ranks, with logs and figures in runs",
    "eval run.yml": "run.yml: starting 2 ranks, with logs and figures in runs",
    "blocks run.yml": "run.yml: capturing the model",
    "verify run.yml": "run.yml: training some updates with the pipeline, then without it",
    "plan run.yml": "run.yml: measuring the blocks of the model, this machine and its links",
    "profile run.yml": "run.yml: measuring the blocks of the model, this machine and its links",
    "compare run.yml": "1 of 1: run",
    "converge run.yml": "1 of 2: 1f1b",
    "report .": "reading .",
    "doctor": "examining this machine",
    "diagnose .": "reading .",
    "checkpoint show .": "reading the checkpoints of .",
    "checkpoint verify .": "reading the checkpoints of .",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_says_what_it_does_before_torch_is_there(
    command: str, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(config.parent)
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *command.split()], capture_output=True, text=True, timeout=TIMEOUT
    )
    found = json.loads(ended.stdout)
    assert found["first"].startswith(COMMANDS[command]), found
    assert found["torch"] is False
