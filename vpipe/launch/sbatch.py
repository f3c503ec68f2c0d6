"""A run as a job of SLURM: the script for `sbatch`, and its submission.

The ranks are tasks of one step. Shortly before the time limit SLURM sends them SIGTERM: they save and end with exit
code 75, and the script puts the job back into the queue. When SLURM itself takes the nodes away (pre-emption,
`scontrol requeue`), it signals the script too and requeues the job without it. A requeued job goes on in its own
folder (`slurm.py`).
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vpipe.errors import ConfigError, NotWrittenError, Stopped, VPipeError
from vpipe.launch.place import from_elsewhere
from vpipe.system.faults import ATTEMPT

if TYPE_CHECKING:
    from vpipe.config import RunConfig

SAVING = 120
"""Seconds before the time limit at which the ranks are asked to save and end."""
OURS = ("job-name", "nodes", "ntasks", "ntasks-per-node", "wrap")
"""Options that are given in another way, or not at all."""
# An option is a comment for the shell. Without space, quotes, backslash and # it is one word for sbatch.
_NAME, _VALUE = re.compile(r"[a-z]+(-[a-z]+)*"), re.compile(r"[!$-&(-\[\]-~]{1,200}")
_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}")
_SCRIPT = """\
#!/bin/bash
{options}
# Written by `vpipe train --slurm`.

cd {directory} || exit
ended=
trap 'ended=yes' TERM  # scancel; or SLURM requeues the job by itself

for attempt in {{0..{max_restarts}}}; do
    {attempt}=$attempt {command}
    code=$?
    case $code in {final}) break ;; esac
    [ -z "$ended" ] || break
done

if [ "$code" = {saved} ] && [ -z "$ended" ]; then
    scontrol requeue "$SLURM_JOB_ID"  # the time limit is near, and the ranks have saved: go on in the queue
fi
exit "$code"
"""


@dataclass(frozen=True)
class Resources:
    """What the job asks for; what is not given is left to the cluster."""

    partition: str | None = None
    time: str | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    cpus_per_task: int | None = None
    others: Sequence[str] = ()
    """Any other options of sbatch, as NAME=VALUE or NAME."""


def sbatch_script(
    config: RunConfig, arguments: Sequence[str], resources: Resources, max_restarts: int = 0
) -> str:
    """The script of a job that runs `vpipe` with these arguments on every rank."""
    cpus = [] if resources.cpus_per_task is None else [f"--cpus-per-task={resources.cpus_per_task}"]
    # A rank that has saved must not end the others, whatever the cluster's default is: they are still saving.
    step = ["srun", "--kill-on-bad-exit=0", *cpus]
    command = [*step, sys.executable, "-m", "vpipe", *from_elsewhere(config, arguments)]
    options = [
        f"#SBATCH --{name}" + (f"={value}" if value else "")
        for name, value in _options(config, resources).items()
    ]
    return _SCRIPT.format(
        options="\n".join(options),
        directory=shlex.quote(str(Path().absolute())),
        attempt=ATTEMPT,
        max_restarts=max_restarts,
        command=shlex.join(command),
        final="|".join(map(str, (0, VPipeError.exit_code, NotWrittenError.exit_code, Stopped.exit_code))),
        saved=Stopped.exit_code,
    )


def submit(script: str) -> str:
    """The number of the job, once SLURM has it."""
    program = shutil.which("sbatch")
    if program is None:
        raise VPipeError(
            "--slurm: there is no sbatch here: start it where SLURM is installed, or write the script with --dry-run"
        )
    done = subprocess.run([program, "--parsable"], input=script, capture_output=True, text=True, check=False)
    if done.returncode:
        raise VPipeError(f"sbatch refused the job: {' '.join(done.stderr.split()) or done.returncode}")
    return done.stdout.strip().partition(";")[0]


def _options(config: RunConfig, resources: Resources) -> dict[str, str]:
    given = {
        "partition": resources.partition,
        "time": resources.time,
        "gpus-per-node": resources.gpus_per_node,
        "cpus-per-task": resources.cpus_per_task,
    }
    options = {
        "job-name": re.sub(r"[^A-Za-z0-9_.-]", "_", config.source.stem) or "vpipe",
        **_tasks(config, resources),
        "requeue": "",
        "open-mode": "append",  # a requeued job writes behind what was there
        "signal": f"TERM@{SAVING}",
        **{name: _value(f"--{name}", str(value)) for name, value in given.items() if value is not None},
    }
    if resources.time is not None and not _TIME.fullmatch(resources.time):
        raise ConfigError(
            f"--time is {resources.time!r}: write minutes, hours:minutes:seconds or days-hours, such as 30, 12:00:00 "
            "or 2-12"
        )
    for other in resources.others:
        name, equals, value = other.partition("=")
        name = name.removeprefix("--")
        if not _NAME.fullmatch(name) or name in OURS:
            raise ConfigError(
                f"--sbatch is {other!r}: write an option of sbatch as NAME=VALUE, such as account=physics, other than "
                f"{', '.join(OURS)}"
            )
        options[name] = _value(f"--sbatch {name}", value) if equals else ""
    return options


def _tasks(config: RunConfig, resources: Resources) -> dict[str, str]:
    """A task for each rank, and as many on each node as it has GPUs."""
    ranks, nodes, gpus = config.ranks, resources.nodes, resources.gpus_per_node
    if nodes is None and gpus is not None:
        nodes = -(-ranks // gpus)
    if nodes is None:
        return {"ntasks": str(ranks)}
    if nodes > ranks:
        raise ConfigError(
            f"--nodes is {nodes}, and {config.source} describes {ranks} ranks: give at most {ranks}"
        )
    if gpus is not None and ranks > nodes * gpus:
        raise ConfigError(
            f"{config.source} describes {ranks} ranks, and {nodes} nodes with {gpus} GPUs have {nodes * gpus}: give "
            "more --nodes or --gpus-per-node"
        )
    return {"ntasks": str(ranks), "nodes": str(nodes), "ntasks-per-node": str(-(-ranks // nodes))}


def _value(place: str, value: str) -> str:
    if not _VALUE.fullmatch(value):
        raise ConfigError(
            f"{place} is {value[:80]!r}: give one word of at most 200 letters, without quotes, \\ and #"
        )
    return value
