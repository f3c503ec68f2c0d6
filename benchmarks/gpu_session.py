"""Benchmarks one after the other on a machine that is lent for minutes, with a long job that fills the time between.

    python benchmarks/gpu_session.py --logs logs --seconds 580 --background "python benchmarks/staleness.py ..." \\
        "quiet: python benchmarks/gpu_targets.py --model mixtral" "beside: python benchmarks/starts.py run.yml first"

Losses need no quiet card, speeds do: the background job is stopped (SIGSTOP) while a `quiet` step runs, and goes on
beside the others. It outlives this command, so that the next call of the session finds it by its number in `logs`; the
call that has `--end` ends it. A step that would begin after `--seconds`, or lasts longer, is left out or ended. Each
has a log of its own, of which the last lines are shown.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

SHOWN = 6
"""Lines of a step's log."""
DRAIN = 1.0
"""Seconds after which a GPU has done what a stopped job has given it."""


class Background:
    """The long job, of this call or of one before."""

    def __init__(self, logs: Path) -> None:
        self.file, self.log = logs / "background.pid", logs / "background.log"

    @property
    def group(self) -> int | None:
        with suppress(OSError, ValueError, IndexError):
            group = int(self.file.read_text())
            if Path(f"/proc/{group}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                return group
        return None

    def begin(self, command: str) -> None:
        if self.group is None:
            job = start(command, self.log)
            self.file.write_text(str(job.pid))

    def send(self, number: signal.Signals) -> None:
        group = self.group
        if group is not None:
            with suppress(ProcessLookupError):
                os.killpg(group, number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("steps", nargs="*", help='"quiet: COMMAND" or "beside: COMMAND"')
    parser.add_argument("--background", help="a command, begun unless the one of an earlier call still runs")
    parser.add_argument("--logs", type=Path, default=Path("session"))
    parser.add_argument("--seconds", type=float, default=580.0)
    parser.add_argument("--wait", action="store_true", help="at last, for the background job")
    parser.add_argument("--end", action="store_true", help="at last, the background job")
    arguments = parser.parse_args()
    steps = [step.partition(": ")[::2] for step in arguments.steps]
    if wrong := [kind for kind, _ in steps if kind not in ("quiet", "beside")]:
        parser.error(f"a step begins with {wrong[0]!r}: write `quiet: COMMAND` or `beside: COMMAND`")
    arguments.logs.mkdir(parents=True, exist_ok=True)
    background, end = Background(arguments.logs), time.monotonic() + arguments.seconds
    if arguments.background:
        background.begin(arguments.background)
    for number, (kind, command) in enumerate(steps):
        if kind == "quiet":
            background.send(signal.SIGSTOP)
            time.sleep(DRAIN if background.group else 0.0)
        run(f"step{number}", command, arguments.logs, end)
        background.send(signal.SIGCONT)
    while arguments.wait and background.group and time.monotonic() < end:
        time.sleep(1.0)
    if arguments.end:
        background.send(signal.SIGKILL)
    show(background.log)


def run(name: str, command: str, logs: Path, end: float) -> None:
    left = end - time.monotonic()
    if left <= 0:
        print(f"left out: {command}", flush=True)
        return
    began, log = time.monotonic(), logs / f"{name}.log"
    log.unlink(missing_ok=True)  # of an earlier call
    job = start(command, log)
    try:
        ended = f"ended with {job.wait(left)}"
    except subprocess.TimeoutExpired:
        ended = "was ended: there was no more time"
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    print(f"{time.monotonic() - began:6.1f} s  {command}: {ended}", flush=True)
    show(log)


def start(command: str, log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            shlex.split(command), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )


def show(log: Path) -> None:
    if log.exists():
        for line in log.read_text(errors="replace").splitlines()[-SHOWN:]:
            print(f"          {line}", flush=True)


if __name__ == "__main__":
    main()
