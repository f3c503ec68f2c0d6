"""A stand-in for Apptainer: it writes down how it was called, and runs the command of the container outside of any."""

import json
import os
import sys
from pathlib import Path
from typing import Any

_PROGRAM = """\
#!{python}
import json, os, sys
words = sys.argv[1:]
options = {{"--bind": [], "--pwd": []}}
flags = []
assert words.pop(0) == "exec", sys.argv
while words[0].startswith("--"):
    word = words.pop(0)
    options[word].append(words.pop(0)) if word in options else flags.append(word)
image, *command = words
called = {{
    "flags": flags, "bind": options["--bind"], "pwd": options["--pwd"], "image": image, "command": command,
    "rank": os.environ["RANK"], "cwd": os.getcwd(), "process": os.getpid(), "secret": "VPIPE_SECRET" in os.environ,
}}
with open({calls!r}, "a") as file:
    file.write(json.dumps(called) + "\\n")
missing = [path for path in options["--bind"] if not os.path.isdir(path)]
assert not missing, missing  # Apptainer refuses them
assert command[0] == "python3", command
os.chdir(options["--pwd"][0])
if {run!r}:
    os.execv({python!r}, [{python!r}, *command[1:]])
"""


def install(folder: Path, *, run: bool = True) -> dict[str, str]:
    """Put the program there; the environment in which it is found. Without `run` the command is only written down."""
    folder.mkdir()
    program = folder / "apptainer"
    program.write_text(_PROGRAM.format(python=sys.executable, calls=str(folder / "calls"), run=run))
    program.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def calls(folder: Path) -> list[dict[str, Any]]:
    """How it was called, in order of the ranks."""
    lines = (folder / "calls").read_text().splitlines()
    return sorted(map(json.loads, lines), key=lambda call: int(call["rank"]))
