"""The real command line, in a process of its own, with a timeout and nothing left behind."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.end_to_end.forked import Forked
from tests.waiting import TIMEOUT, wait_until


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        return self.out + self.err


def vpipe(
    *arguments: object,
    cwd: Path,
    timeout: float = TIMEOUT,
    launcher: tuple[str, ...] = (),
    new: bool = False,
    **forked: Any,
) -> Ended:
    """Run `vpipe` with these arguments to its end; in new interpreters, or in processes that have all imported."""
    process = start(*arguments, cwd=cwd, launcher=launcher, new=new or bool(launcher), **forked)
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        end(process)
    assert process.returncode is not None
    return Ended(process.returncode, out, err)


def start(
    *arguments: object, cwd: Path, launcher: tuple[str, ...] = (), new: bool = True, **forked: Any
) -> "subprocess.Popen[str] | Forked":
    """Start it; `forked` is what `Forked` can be given besides."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    if not new:
        return Forked([str(argument) for argument in arguments], cwd, environment, **forked)
    command = [sys.executable, "-m", *(launcher or ("vpipe",)), *map(str, arguments)]
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=_heed_interrupts,
    )


def _heed_interrupts() -> None:
    """A shell that starts the tests in the background lets its children ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def end(process: "subprocess.Popen[str] | Forked") -> None:
    """Whatever is still there of the command and its children."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait(TIMEOUT)


def wait_for_line(text: str, folder: Path, rank: int = 0) -> None:
    """Until this rank of the run that was started in this folder has said this."""
    logs = f"runs/*/output.log.{rank}"
    wait_until(
        lambda: any(text in log.read_text() for log in folder.glob(logs)), f"{text!r} in {folder / logs}"
    )


def wait_until_gone(marker: str) -> None:
    """A process that was killed, and that nobody waits for, is there until it has had the processor once more."""
    wait_until(lambda: not alive(marker), f"the end of all processes of {marker}")


def alive(marker: str) -> list[str]:
    """Processes that bear the marker (a test's own folder) in their arguments or environment, or are in it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
                text += os.fsencode(os.readlink(entry / "cwd"))
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if marker.encode() in text and state != "Z":
                found.append(entry.name)
    return found


def rank_process(rank: int, folder: Path) -> int | None:
    """The process of a rank of the run that was started in this folder, by its environment or its name."""
    for process in alive(str(folder)):
        entry = Path("/proc", process)
        environment = (entry / "environ").read_bytes().split(b"\0")
        if f"RANK={rank}".encode() in environment or (entry / "comm").read_text() == f"rank {rank}\n":
            return int(process)
    return None
