"""A real run that gets signals from outside: its processes by what they are, and what it leaves behind.

Nothing inside the run knows of the attack: processes are found in /proc and sent signals by their numbers.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.end_to_end.command import alive, start
from tests.faults.runs import failures

LAUNCHER, CLEANUP, GUARD, DAEMON, SERVER = "launcher", "cleanup process", "guard", "daemon", "server"
"""What a process of a run is, besides `rank N`; the last three are those of MPS."""
REPOSITORY = Path(__file__).parents[2]


class Job:
    """`vpipe train run.yml` in a folder, from its start until nothing of it is left."""

    def __init__(self, folder: Path, *options: object, new: bool = False, prepare: Any = None) -> None:
        self.folder = folder
        self._known = set(folder.glob("runs/2*"))
        self._number = len(list(folder.glob("said.*.err")))
        self._process: Any
        self._forked = not new
        if new:
            path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
            with self._said("out").open("wb") as out, self._said("err").open("wb") as err:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "vpipe", "train", "run.yml", *map(str, options)],
                    cwd=folder,
                    env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
        else:
            self._process = start("train", "run.yml", *options, cwd=folder, new=False, prepare=prepare)
        self.pid: int = self._process.pid

    def _said(self, stream: str) -> Path:
        return self.folder / f"said.{self._number}.{stream}"

    @property
    def code(self) -> int | None:
        """The exit code of the launcher, if it has ended."""
        return self._process.returncode if self._forked else self._process.poll()

    @property
    def run(self) -> Path | None:
        """The folder of the run, once there is one."""
        return next(iter(set(self.folder.glob("runs/2*")) - self._known), None)

    @property
    def failures(self) -> list[dict[str, Any]]:
        """The lines about ranks that failed; the last one may be in the middle of being written."""
        try:
            return failures(self.run) if self.run is not None else []
        except ValueError:
            return []

    def output(self) -> str:
        """What the launcher and rank 0 have written to the terminal, once the launcher has ended."""
        if self._forked:
            return "".join(self._process.communicate(10.0))
        return "".join(self._said(stream).read_text(errors="replace") for stream in ("out", "err"))

    def log(self, rank: int) -> str:
        path = None if self.run is None else self.run / f"output.log.{rank}"
        return path.read_text(errors="replace") if path is not None and path.exists() else ""

    def processes(self) -> dict[str, int]:
        """What is alive of it now."""
        found = {LAUNCHER: self.pid} if self.code is None else {}
        for number in alive(str(self.folder)):
            what = _what_is(int(number), self.pid)
            if what is not None:
                found[what] = int(number)
        return found

    def wait(self, happened: Callable[[], Any], limit: float) -> bool:
        """Until it has happened or the launcher has ended; whether one of them came within the limit."""
        deadline = time.monotonic() + limit
        while not happened() and self.code is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def wait_for_end(self, limit: float) -> bool:
        """Whether the launcher and all that it has started are gone within the limit."""
        deadline = time.monotonic() + limit
        while self.code is None or alive(str(self.folder)):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def kill(self) -> None:
        """All that is left of it."""
        for number in (
            {str(self.pid), *alive(str(self.folder))} if self.code is None else alive(str(self.folder))
        ):
            with suppress(ProcessLookupError):
                os.kill(int(number), signal.SIGKILL)
        self._process.wait(30.0)


def _what_is(number: int, launcher: int) -> str | None:
    place = Path("/proc", str(number))
    try:
        name = (place / "comm").read_text().strip()
        command = (place / "cmdline").read_bytes()
        environment = (place / "environ").read_bytes()
        parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None
    rank = re.fullmatch(r"rank (\d+)", name) or re.search(
        r"(?:^|\0)RANK=(\d+)\0", environment.decode(errors="replace")
    )
    if number == launcher:
        return LAUNCHER
    if name.startswith("nvidia-cuda-mps"):  # the kernel keeps 15 letters of a name
        return SERVER if b"mps-server" in command else DAEMON
    if b"vpipe.launch.mps import guard" in command:
        return GUARD
    if rank and parent == launcher:
        return f"rank {rank[1]}"
    return CLEANUP if parent == launcher and _writes_nowhere(place) else None


def _writes_nowhere(place: Path) -> bool:
    """As the cleanup process does, and no rank."""
    with suppress(OSError):
        return os.readlink(place / "fd" / "1") == os.devnull
    return False


def send(number: int, processes: Iterable[int]) -> None:
    """The same signal to some processes, one right after the other; one that has ended by now gets none."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def gone(processes: Iterable[int]) -> bool:
    return not any(Path("/proc", str(process)).exists() for process in processes)
