"""The time from a command to the first update, by phase: several starts of one configuration, one after the other.

    python benchmarks/starts.py run.yml first again "auto: partition=auto" "auto again: partition=auto"

Each start is a name and, behind a colon, settings for `--set`. A run is ended as soon as it has made its first update.
What is kept for later starts (captured graphs, profiles, compiled code) is kept from one start to the next, so that the
order matters: with a cache that is empty before (`VPIPE_CACHE=folder`) the first one is the first of its model. The
table has a column for each start.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

LAST = "first update after"
ENDING = 30.0
"""Seconds that a run has to end when it is asked to, at once, by a second signal."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("starts", nargs="+", metavar="NAME[: KEY=VALUE ...]")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that a start may take")
    arguments = parser.parse_args()
    columns = {}
    for text in arguments.starts:
        name, _, settings = text.partition(":")
        columns[name] = start(arguments.config, settings.split(), arguments.limit)
        print(f"{name}: {columns[name]}", flush=True)
    show(columns)


def start(config: str, settings: list[str], limit: float) -> dict[str, float]:
    """The seconds of each phase, and those until the first output."""
    with tempfile.TemporaryDirectory(prefix="vpipe-starts-") as folder:
        command = [sys.executable, "-m", "vpipe", "train", config, "--verbose"]
        for setting in (f"log_directory={folder}", *settings):
            command += ["--set", setting]
        began = time.monotonic()
        run = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        assert run.stdout is not None
        end = threading.Timer(limit, os.killpg, (run.pid, signal.SIGKILL))
        end.start()
        said: list[str] = []
        phases: dict[str, float] = {}
        for line in run.stdout:
            said.append(line)
            phases.setdefault("first output", time.monotonic() - began)
            name, _, seconds = line.rstrip().removesuffix(" s").rpartition(" ")
            if seconds.replace(".", "", 1).isdecimal() and line.rstrip().endswith(" s"):
                phases[name.strip()] = float(seconds)
            if LAST in line:
                break
        stop(run)
        end.cancel()
        if LAST not in phases:
            sys.exit(f"{config} {' '.join(settings)}: no update within {limit:g} s:\n{''.join(said[-30:])}")
        return phases


def stop(run: subprocess.Popen[str]) -> None:
    """A first signal asks it to save, a second one to end at once."""
    assert run.stdout is not None
    drain = threading.Thread(target=run.stdout.read)
    drain.start()
    for _ in range(2):
        run.send_signal(signal.SIGTERM)
        time.sleep(0.5)
    try:
        run.wait(ENDING)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
    drain.join()


def show(columns: dict[str, dict[str, float]]) -> None:
    """As docs/performance.md has it."""
    phases = list(dict.fromkeys(phase for column in columns.values() for phase in column if phase != LAST))
    print(f"\n| phase | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for phase in (*phases, LAST):
        cells = (f"{column[phase]:.1f}" if phase in column else "" for column in columns.values())
        print(f"| {phase} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
