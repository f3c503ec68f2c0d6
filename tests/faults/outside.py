"""Real runs that get signals from outside: their processes by what they are, and what they leave behind.

Nothing inside a run knows of the attack: processes are found in /proc and sent signals by their numbers.
"""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from tests.end_to_end.command import alive
from tests.end_to_end.forked import Forked, ForkedRank
from tests.faults.hosts import FIRST, NETWORK, enter
from tests.faults.runs import failures

LAUNCHER, CLEANUP, GUARD, DAEMON, SERVER = "launcher", "cleanup process", "guard", "daemon", "server"
"""What a process of a run is, besides `rank N` and torchrun's `agent N`; the last three are those of MPS."""
REPOSITORY = Path(__file__).parents[2]
MOUNTS, MESSAGES = 0x00020000, 0x08000000  # CLONE_NEWNS, CLONE_NEWIPC
PORT = 29417


class Job:
    """`vpipe train run.yml` in a folder, from its start until nothing of it is left.

    Its processes are forked from the tests' server (`prepare` is called in the launcher, first), or are `new`
    interpreters.
    """

    def __init__(
        self,
        folder: Path,
        *options: object,
        new: bool = False,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        number = self._set_up(folder)
        self.said = [folder / f"said.{number}"]
        arguments = ["train", "run.yml", *map(str, options)]
        self.processes: list[Any] = [self._new(arguments) if new else self._forked(arguments, prepare)]

    def _set_up(self, folder: Path) -> int:
        """The number of its first file of output."""
        self.folder = folder
        self.temporary = folder / "t"  # short: sockets may be in it
        self.temporary.mkdir(exist_ok=True)
        self.environment = {
            **os.environ,
            "TMPDIR": str(self.temporary),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "160",
        }
        self._known = set(folder.glob("runs/2*"))
        return len(list(folder.glob("said.*")))

    def _forked(self, arguments: Sequence[str], prepare: Callable[[], None] | None) -> Forked:
        said = str(self.said[0])
        return Forked(arguments, self.folder, self.environment, prepare=prepare, said=(said, said))

    def _new(self, arguments: Sequence[str]) -> "subprocess.Popen[bytes]":
        path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
        with self.said[0].open("wb") as said:
            return subprocess.Popen(
                [sys.executable, "-m", "vpipe", *arguments],
                cwd=self.folder,
                env=self.environment | {"PYTHONPATH": path},
                stdout=said,
                stderr=said,
                start_new_session=True,
            )

    @property
    def codes(self) -> list[int | None]:
        """The exit codes of the processes that were started here, None of one that has not ended."""
        return [p.poll() if isinstance(p, subprocess.Popen) else p.returncode for p in self.processes]

    @property
    def ended(self) -> bool:
        return None not in self.codes

    @property
    def runs(self) -> list[Path]:
        """The folders of the run; torchrun has one for each attempt."""
        return sorted(set(self.folder.glob("runs/2*")) - self._known)

    @property
    def failures(self) -> list[dict[str, Any]]:
        """The lines about ranks that failed; the last one may be in the middle of being written."""
        with suppress(ValueError, OSError):
            return [line for run in self.runs for line in failures(run)]
        return []

    def output(self, since: Sequence[int] = ()) -> str:
        """What launcher and ranks have written to the terminal, from these marks on."""
        starts = since or [0] * len(self.said)
        return "".join(text[start:] for text, start in zip(self._texts(), starts, strict=True))

    def marks(self) -> list[int]:
        """How much has been written until now."""
        return [len(text) for text in self._texts()]

    def _texts(self) -> list[str]:
        return [said.read_text(errors="replace") if said.exists() else "" for said in self.said]

    def trains(self) -> bool:
        """Whether it has made an update."""
        return self.updates_begun() > 0

    def updates_begun(self) -> int:
        """How many lines about updates the log of rank 0 has."""
        return sum(
            run.joinpath("output.log.0").read_text().count("Iteration") for run in self.runs if _exists(run)
        )

    def alive(self) -> dict[str, int]:
        """Its processes, by what they are."""
        found = {}
        mains = [process.pid for process in self.processes]
        for text in alive(str(self.folder)):
            what = self._what_is(int(text), mains)
            if what is not None:
                found[what] = int(text)
        return found

    def _what_is(self, number: int, mains: Sequence[int]) -> str | None:
        if number in mains:
            return LAUNCHER if len(mains) == 1 else f"agent {mains.index(number)}"
        place = Path("/proc", str(number))
        try:
            name = (place / "comm").read_text().strip()
            command = (place / "cmdline").read_bytes()
            environment = (place / "environ").read_text(errors="replace")
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return None
        rank = re.fullmatch(r"rank (\d+)", name) or re.search(r"(?:^|\0)RANK=(\d+)\0", environment)
        if name.startswith("nvidia-cuda-mps"):  # the kernel keeps 15 letters of a name
            return SERVER if b"mps-server" in command else DAEMON
        if b"vpipe.launch.mps import guard" in command:
            return GUARD
        if rank and name != "vpipe":
            return f"rank {rank[1]}"
        return CLEANUP if parent in mains and _writes_nowhere(place) else None

    def wait(self, happened: Callable[[], Any], limit: float) -> bool:
        """Until it has happened or the run has ended; whether one of them came within the limit."""
        return within(limit, lambda: happened() or self.ended)

    def wait_for_end(self, limit: float) -> bool:
        """Whether all that belongs to it is gone within the limit."""
        return within(limit, lambda: self.ended and not alive(str(self.folder)))

    def kill(self) -> None:
        """All that is left of it."""
        send(signal.SIGKILL, map(int, alive(str(self.folder))))
        for process in self.processes:
            process.wait(30.0)


class TorchrunJob(Job):
    """The same by torchrun on two hosts, a rank on each, which meet by its own rendezvous."""

    def __init__(self, folder: Path, hosts: Sequence[str], *options: object) -> None:
        number = self._set_up(folder)
        self.said = [folder / f"said.{number + host}" for host in range(len(hosts))]
        rendezvous = [
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            f"{FIRST}:{PORT}",
            "--rdzv-id",
            f"job{number}",
        ]
        self.processes = []
        for host, name in enumerate(hosts):
            place = ["--nnodes", str(len(hosts)), "--nproc-per-node", "1", "--max-restarts", "100"]
            place += [
                *rendezvous,
                "--rdzv-conf",
                f"is_host={1 - host}",
                "--local-addr",
                f"{FIRST[:-1]}{host + 1}",
            ]
            arguments = [*place, "-m", "vpipe", "train", "run.yml", *map(str, options)]
            prepare = partial(_torchrun, name, arguments, str(folder), self.environment, str(self.said[host]))
            self.processes.append(Forked([], folder, {}, prepare=prepare))


def _torchrun(host: str, arguments: list[str], folder: str, environment: dict[str, str], said: str) -> None:
    """`torchrun` in a forked process; its ranks are forked too."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    enter(host)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    output = os.open(said, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(output, number)
    subprocess_handler.Popen = TorchrunRank  # type: ignore[attr-defined, misc]
    run.main(arguments)
    sys.exit(0)


class TorchrunRank(ForkedRank):
    """Forks where torchrun starts `python -u -m vpipe`."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        super()._execute_child([part for part in args if part != "-u"], *rest)


def isolate() -> bool:
    """Give this process, and all that it starts, a network and a /dev/shm of their own; whether that is permitted.

    What is found there afterwards is then of no other program.
    """
    if ctypes.CDLL(None, use_errno=True).unshare(NETWORK | MOUNTS | MESSAGES):
        return False
    for command in (
        ["mount", "--make-rprivate", "/"],
        ["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"],
        ["ip", "link", "set", "lo", "up"],
    ):
        subprocess.run(command, check=True, capture_output=True)
    return True


def open_sockets() -> set[str]:
    """Sockets of this network that belong to a process: TCP ones, and Unix ones with a name that is no file's."""
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[9] != "0":  # an end that merely waits for late packets belongs to nobody
            found.add(f"tcp {fields[1]} {fields[2]} {fields[3]}")
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        name = line.split()[7:]
        if name and name[0].startswith("@"):
            found.add(f"unix {name[0]}")
    return found


def send(number: int, processes: Iterable[int]) -> list[int]:
    """A signal to some processes, one right after the other; those that were there."""
    found = []
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)
            found.append(process)
    return found


def within(limit: float, happened: Callable[[], Any]) -> bool:
    """Whether it happens within the limit, in seconds."""
    deadline = time.monotonic() + limit
    while not happened():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def gone(processes: Iterable[int]) -> bool:
    return not any(Path("/proc", str(process)).exists() for process in processes)


def _exists(run: Path) -> bool:
    return (run / "output.log.0").exists()


def _writes_nowhere(place: Path) -> bool:
    """As the cleanup process does, and no rank."""
    with suppress(OSError):
        return os.readlink(place / "fd" / "1") == os.devnull
    return False
