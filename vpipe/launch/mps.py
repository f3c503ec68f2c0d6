"""Several ranks on one GPU: NVIDIA's MPS lets them compute at the same time, each with its share of the card.

The daemon is started for the run alone, in folders of its own, by a guard: a small process that waits for the launcher
to end, however it ends, and then ends the daemon and removes the folders. If the guard is killed or stopped, the
launcher does its work.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from vpipe.errors import ConfigError, VPipeError
from vpipe.launch.helpers import end_helper, helping
from vpipe.system.environment import ALLOCATOR, DEVICE, GPU_SHARE

if TYPE_CHECKING:
    from vpipe.config import RunConfig

CONTROL = "nvidia-cuda-mps-control"
VISIBLE = "CUDA_VISIBLE_DEVICES"
READY = b"ready\n"
START_LIMIT = 60.0
"""Seconds within which the daemon must have started."""
_GUARD = "the guard of MPS"
QUIT_LIMIT = 2
"""Seconds that the daemon gives its clients when it has to end."""
KILL_LIMIT = 4.0
"""Seconds that the daemon has to answer, and again to be gone: a client that was killed in the middle of its work can
leave it hanging. Twice as long is less than a helper has to end."""


def visible_gpus(devices: Path = Path("/dev")) -> list[str]:
    """The NVIDIA GPUs that ranks will see, as CUDA_VISIBLE_DEVICES names them (index, UUID or name of a MIG instance).

    Without asking CUDA, which takes seconds. Like CUDA, it ends at the first entry that names no GPU.
    """
    count = sum(1 for _ in devices.glob("nvidia[0-9]*"))
    written = os.environ.get(VISIBLE)
    if written is None or not count:
        return [str(index) for index in range(count)]
    entries = [entry.strip() for entry in written.split(",")]
    return list(takewhile(lambda name: _is_gpu(name, count), entries))


def _is_gpu(name: str, count: int) -> bool:
    return int(name) < count if name.isdecimal() else name.startswith(("GPU-", "MIG-"))


def count_gpus(devices: Path = Path("/dev")) -> int:
    return len(visible_gpus(devices))


def gpus_of(config: RunConfig, own: Sequence[int] | None = None) -> list[int] | None:
    """The GPU of each rank, or of those of this host: from `machines`, or one after the other; None without a GPU."""
    count = count_gpus()
    if not count or DEVICE in os.environ:
        return None
    if config.machines is None:
        return [rank % count for rank in range(config.ranks)]
    here = range(len(config.machines)) if own is None else own
    named = [int(config.machines[rank].rpartition(":")[2]) for rank in here]
    if max(named) >= count:
        shown = f" (CUDA_VISIBLE_DEVICES is {os.environ[VISIBLE]!r})" if VISIBLE in os.environ else ""
        raise ConfigError(
            f"{config.source}: machines names GPU {max(named)}, and this host has {count}{shown}: "
            f"name 0 to {count - 1}; several ranks may share one"
        )
    return named


def share_one_gpu(gpus: Sequence[int] | None) -> bool:
    """Whether several ranks are all that there are on one GPU: each has its share of it, so none may stay idle."""
    return gpus is not None and len(gpus) > 1 == len(set(gpus))


@contextmanager
def sharing(gpus: Sequence[int]) -> Iterator[list[Mapping[str, str]]]:
    """The variables for each rank's environment, by which it computes on its GPU, with its share of it."""
    counts = Counter(gpus)
    shared = {gpu: count for gpu, count in counts.items() if count > 1}
    installed = shutil.which(CONTROL) is not None
    for gpu, count in () if installed else shared.items():
        print(
            f"{count} ranks share GPU {gpu}, one after the other: {CONTROL} is not installed, which would let them "
            "compute at the same time",
            file=sys.stderr,
        )
    common: dict[str, str] = {}
    if not any(name in os.environ for name in ALLOCATOR):
        # Segments that grow: the allocator keeps fewer pieces that nothing fits into.
        common[ALLOCATOR[0]] = "expandable_segments:True"
    own = {gpu: {DEVICE: f"cuda:{gpu}", GPU_SHARE: str(count)} for gpu, count in counts.items()}
    with ExitStack() as stack:
        if shared and installed:
            common |= stack.enter_context(_daemon()) | _renumbered(os.environ)
            for gpu, count in counts.items():
                own[gpu]["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(100 // count)
        yield [common | own[gpu] for gpu in gpus]


@contextmanager
def _daemon() -> Iterator[dict[str, str]]:
    """MPS while the context lasts; the variables by which its clients find it."""
    folder = Path(tempfile.mkdtemp(prefix="vpipe-mps-"))
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from vpipe.launch.mps import guard; guard(sys.argv[1])",
            str(folder),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        begun, _, _ = select.select([process.stdout], [], [], START_LIMIT)
        if not begun or process.stdout.readline() != READY:
            raise VPipeError(f"{CONTROL} did not start: see {folder}, or give each rank a GPU of its own")
        with helping(process.pid, _GUARD, f"the daemon of MPS in {folder} ends when the launcher ends it"):
            yield _variables(folder)
    finally:
        process.stdin.close()
        in_time = end_helper(process.pid, _GUARD, lambda: process.poll() is not None)
        if not in_time or process.returncode < 0:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a program that it has called
            _quit(folder)
        process.stdout.close()


def _renumbered(environment: Mapping[str, str]) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES for a client of the daemon, which was started with the user's own.

    The daemon numbers the GPUs that it sees anew, from 0, and its clients choose by those numbers. Names stay.
    """
    entries = environment.get(VISIBLE, "").split(",")
    if VISIBLE not in environment:
        return {}
    names = [str(n) if name.strip().isdecimal() else name.strip() for n, name in enumerate(entries)]
    return {VISIBLE: ",".join(names)}


def _variables(folder: Path) -> dict[str, str]:
    return {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}


def guard(place: str) -> None:
    """Start the daemon, write READY, and end it when the launcher closes our input, or dies."""
    folder = Path(place)
    environment = {**os.environ, **_variables(folder)}
    for path in _variables(folder).values():
        Path(path).mkdir()
    started = subprocess.run([CONTROL, "-d"], env=environment, stdout=subprocess.DEVNULL, check=False)
    if started.returncode:
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        os.write(sys.stdout.fileno(), READY)
        sys.stdin.buffer.read()
    finally:
        _quit(folder)


def _quit(folder: Path) -> None:
    """End the daemon of this folder and its servers, by force if they do not quit, and remove the folder."""
    with suppress(subprocess.TimeoutExpired):
        subprocess.run(
            [CONTROL],
            input=f"quit -t {QUIT_LIMIT}\n".encode(),
            env={**os.environ, **_variables(folder)},
            stdout=subprocess.DEVNULL,
            timeout=KILL_LIMIT,
            check=False,
        )
    deadline = time.monotonic() + KILL_LIMIT
    while (left := _processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for process in left:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def _processes_of(folder: Path) -> list[int]:
    """The daemon, its servers, and programs that talk to it, by their names and their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if (
                entry.name.isdigit()
                # The kernel keeps 15 letters of a name.
                and (entry / "comm").read_text().startswith(CONTROL[:15])
                and os.fsencode(folder) in (entry / "environ").read_bytes()
            ):
                found.append(int(entry.name))
    return found
