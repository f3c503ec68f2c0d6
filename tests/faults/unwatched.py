"""The time until all ranks have ended without a launcher: it was killed, or there is none. A part of `make faults`.

python -m tests.faults.unwatched
"""

import os
import signal
import socket
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.end_to_end.command import alive, end, start, wait_for_line
from tests.faults.hosts import FIRST, enter, two_hosts
from tests.faults.runs import write_config

LIMIT = 3.0
"""The ranks' `heartbeat_limit`, in seconds."""
TO_END = 5.0
"""Seconds that ranks have to end, once a fault is found."""


class Gone(NamedTuple):
    fault: str
    seconds: float
    most: float


def measure_unwatched(folder: Path) -> list[Gone]:
    """Each in a run of its own that would never end."""
    return [
        _launcher_killed(_endless(folder / "launcher", 2)),
        _rank_fell("a rank is killed", signal.SIGKILL, TO_END, _endless(folder / "killed", 3)),
        _rank_fell("a rank is stopped", signal.SIGSTOP, LIMIT + TO_END, _endless(folder / "stopped", 3)),
        _cable_cut(_endless(folder / "cut", 2)),
    ]


def as_table(found: list[Gone]) -> str:
    lines = [
        f"| fault (`heartbeat_limit` {LIMIT:g} s) | all others gone after (s) | at most |",
        "|---|---|---|",
    ]
    lines += [f"| {gone.fault} | {gone.seconds:.1f} | {gone.most:g} |" for gone in found]
    return "\n".join(lines) + "\n"


def _launcher_killed(folder: Path) -> Gone:
    process = start("train", "run.yml", cwd=folder, new=False)
    try:
        wait_for_line("Iteration", folder)
        os.kill(process.pid, signal.SIGKILL)
        return Gone("the launcher is killed", _until_gone(folder), TO_END)
    finally:
        end(process)


def _rank_fell(fault: str, number: int, most: float, folder: Path) -> Gone:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        own = [{"listener": listener}, {}, {}]
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}
        with _one_by_one(folder, place, own) as ranks:
            listener.close()
            wait_for_line("Iteration", folder)
            os.kill(ranks[1].pid, number)
            return Gone(f"without a launcher, {fault}", _until_gone(folder, {ranks[1].pid}), most)


def _cable_cut(folder: Path) -> Gone:
    with two_hosts() as hosts:
        place = {"MASTER_ADDR": FIRST, "MASTER_PORT": "29517"}  # a host has all its ports
        own = [{"prepare": partial(enter, name)} for name in hosts.names]
        with _one_by_one(folder, place, own):
            wait_for_line("Iteration", folder)
            hosts.cut()
            return Gone("the cable between two hosts is cut", _until_gone(folder), LIMIT + TO_END)


@contextmanager
def _one_by_one(folder: Path, place: dict[str, str], own: list[dict[str, Any]]) -> Iterator[list[Any]]:
    """Ranks as their users start them, without a launcher; `own` is what each is started with besides."""
    with ExitStack() as ending, pytest.MonkeyPatch.context() as patch:
        ranks = []
        for rank, more in enumerate(own):
            for key, value in {**place, "WORLD_SIZE": str(len(own)), "RANK": str(rank)}.items():
                patch.setenv(key, value)
            ranks.append(start("train", "run.yml", cwd=folder, new=False, **more))
            ending.callback(end, ranks[-1])
        yield ranks


def _endless(folder: Path, ranks: int) -> Path:
    folder.mkdir()
    write_config(
        folder,
        ranks,
        machines=None,  # they may be put on two hosts
        stages=ranks,
        max_updates=None,
        epochs=100_000,
        print_frequency=1,
        heartbeat_limit=LIMIT,
        checkpoint_interval=0,
    )
    return folder


def _until_gone(folder: Path, but: Collection[int] = ()) -> float:
    began = time.monotonic()
    while any(int(process) not in but for process in alive(str(folder))):
        time.sleep(0.02)
    return time.monotonic() - began


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        print(as_table(measure_unwatched(Path(name))), end="")
