"""Ranks that share a GPU under MPS, attacked from outside with signals: some minutes on a host with a GPU.

python -m tests.faults.attack_gpu [--seed 0] [--seconds 270]

One run for each schedule is struck again and again, restarts each time, and is asked to end when all is done. It must
then have the weights of an undisturbed run of as many updates. Between two strikes no process of the attempt before may
be left, neither its ranks nor the daemon of MPS with its server; in the end the GPU has as much free memory as before.
With VPIPE_DEVICE=cpu there is no daemon: to try the script itself.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGABRT, SIGCONT, SIGKILL, SIGSEGV, SIGSTOP, SIGTERM, Signals
from typing import Any

from tests.faults.outside import DAEMON, GUARD, LAUNCHER, SERVER, Job, gone, send
from tests.faults.runs import final_weights, write_config

RANKS = 3
LIMIT = 4.0
"""The ranks' `heartbeat_limit`, in seconds."""
HANG = 45.0
"""Seconds within which a run is back after a strike, or has ended."""
PAUSE = 2.0
"""Seconds after which a process that was stopped goes on, where it does."""
SLACK = 32
"""MiB of the GPU's memory that may differ before and after: what the driver keeps."""


@dataclass(frozen=True)
class Strike:
    targets: tuple[str, ...]
    signal: Signals
    resumed: bool = False

    @property
    def helper(self) -> bool:
        """Whether no rank is struck: the run may go on."""
        return self.targets[0] in (GUARD, DAEMON, SERVER)

    def __str__(self) -> str:
        again = f", SIGCONT {PAUSE:g} s later" if self.resumed else ""
        return f"{' and '.join(self.targets)}: {self.signal.name}{again}"


STRIKES = {
    "vpipe": (
        Strike(("rank 1",), SIGKILL),
        Strike(("rank 2",), SIGSEGV),
        Strike(("rank 0",), SIGSTOP),
        Strike(("rank 0", "rank 2"), SIGKILL),
        Strike((SERVER,), SIGKILL),
        Strike((GUARD,), SIGSTOP),
        Strike((LAUNCHER,), SIGKILL),
    ),
    "1f1b": (
        Strike(("rank 0",), SIGKILL),
        Strike(("rank 1",), SIGSTOP, resumed=True),
        Strike(("rank 2",), SIGSTOP),
        Strike((DAEMON,), SIGKILL),
        Strike((GUARD,), SIGKILL),
        Strike(("rank 1",), SIGABRT),
    ),
}


@dataclass
class Seen:
    schedule: str
    strike: Strike
    memory: int | None = None  # MiB of the GPU in use when it was struck
    found: float | None = None
    ended: float | None = None
    again: float | None = None
    culprit: str = ""
    faults: list[str] = field(default_factory=list)

    def row(self) -> str:
        seconds = ["" if s is None else f"{s:.1f}" for s in (self.found, self.ended, self.again)]
        memory = "" if self.memory is None else str(self.memory)
        verdict = "; ".join(self.faults) or "as it should"
        cells = [self.schedule, str(self.strike), memory, *seconds, self.culprit, verdict]
        return f"| {' | '.join(cells)} |"


HEAD = (
    "| schedule | strike | GPU memory before (MiB) | found after (s) | all gone after (s) | trains again after (s) "
    "| named | verdict |\n|---|---|---|---|---|---|---|---|"
)


def gpu_memory() -> int | None:
    """MiB in use on the first GPU, by all processes."""
    if shutil.which("nvidia-smi") is None or os.environ.get("VPIPE_DEVICE") == "cpu":
        return None
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    said = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60)
    return int(said.stdout.split()[0])


def memory_is_back(before: int | None, limit: float = 20.0) -> tuple[bool, int | None]:
    deadline = time.monotonic() + limit
    while (now := gpu_memory()) is not None and before is not None and now > before + SLACK:
        if time.monotonic() > deadline:
            return False, now
        time.sleep(0.5)
    return True, now


def attack(
    folder: Path, schedule: str, drawn: random.Random, deadline: float, keys: dict[str, Any]
) -> tuple[list[Seen], list[str]]:
    """One run under all strikes of its schedule; what was seen of each, and what was wrong in the end."""
    folder.mkdir()
    machines = ["localhost:0"] * RANKS
    endless = {"max_updates": None, "epochs": 100_000, "checkpoint_interval": 20, "print_frequency": 10}
    write_config(
        folder,
        RANKS,
        schedule=schedule,
        heartbeat_limit=LIMIT,
        machines=machines,
        deterministic=True,
        **endless,
        **keys,
    )
    before = gpu_memory()
    seen: list[Seen] = []
    job = Job(folder, "--max-restarts", 100, new=True)
    faults: list[str] = []
    try:
        assert job.wait(job.trains, 2 * HANG), f"the run did not begin: {job.output()}"
        for strike in STRIKES[schedule]:
            if time.monotonic() > deadline:
                seen.append(Seen(schedule, strike, faults=["not tried: no time was left"]))
                continue
            if job.ended:
                faults.append(f"the run has ended with code {job.codes}: {job.output()[-500:]!r}")
                break
            time.sleep(drawn.uniform(0.3, 2.0))
            one = Seen(schedule, strike, memory=gpu_memory())
            seen.append(one)
            if strike.targets == (LAUNCHER,):
                job = _launcher_killed(job, one, before)
            elif not all(target in job.alive() for target in strike.targets):
                one.faults.append("not tried: there is no such process")
            else:
                _struck(job, one)
            print(one.row(), flush=True)
        updates = _stop(job, faults)
        if updates is not None:
            _compare(folder, job, updates, faults)
    finally:
        job.kill()
    if left := sorted(path.name for path in job.temporary.iterdir() if path.name.startswith("vpipe")):
        faults.append(f"left in the folder for temporary files: {left}")
    back, now = memory_is_back(before)
    print(f"{schedule}: GPU memory in use before {before} MiB, afterwards {now} MiB", flush=True)
    if not back:
        faults.append(f"GPU memory in use: {before} MiB before, {now} MiB afterwards")
    return seen, faults


def _struck(job: Job, one: Seen) -> None:
    strike = one.strike
    processes = job.alive()
    told = len(job.failures)
    at = time.time()
    send(strike.signal, [processes[target] for target in strike.targets])
    if strike.resumed:
        time.sleep(min(PAUSE, 0.4 * LIMIT))
        send(SIGCONT, [processes[target] for target in strike.targets])
    if (strike.resumed or strike.helper) and not job.wait(lambda: len(job.failures) > told, LIMIT + 1.0):
        one.culprit = "goes on"
        if strike.resumed:
            return
        # What becomes of the helper matters when the attempt ends.
        send(SIGKILL, [processes["rank 1"]])
    if not job.wait(lambda: len(job.failures) > told, HANG):
        one.faults.append(f"no fault was found within {HANG:g} s")
        return
    if job.ended:
        one.faults.append(f"the run ended with code {job.codes}: {job.output()[-500:]!r}")
        return
    failed = job.failures[told]
    one.found, one.ended = failed["found"] - at, failed["ended"] - at
    one.culprit += (
        ", then " if one.culprit else ""
    ) + f"rank {failed['rank']}: {failed['how'].partition(' (')[0]}"
    if not strike.helper:
        word = "stopped (SIGSTOP)" if strike.signal == SIGSTOP else f"killed by {strike.signal.name}"
        if f"rank {failed['rank']}" not in strike.targets or not failed["how"].startswith(word):
            one.faults.append("the wrong rank or reason is named")
    if not job.wait(lambda: any("recovered" in line for line in job.failures[told + 1 :]), HANG):
        one.faults.append(f"it does not train again within {HANG:g} s")
        return
    if job.ended:
        one.faults.append(f"the run ended with code {job.codes}: {job.output()[-500:]!r}")
        return
    back = next(line["recovered"] for line in job.failures[told + 1 :] if "recovered" in line)
    one.again = back - at
    left = {what: number for what, number in processes.items() if what != LAUNCHER and not gone([number])}
    if left:
        one.faults.append(f"left of the attempt before: {left}")


def _launcher_killed(job: Job, one: Seen, before: int | None) -> Job:
    """Nothing is left of it, and the GPU's memory is free; another one then goes on."""
    at = time.time()
    send(one.strike.signal, [job.alive()[LAUNCHER]])
    if not job.wait_for_end(HANG):
        one.faults.append(f"left after {HANG:g} s: {job.alive()}")
    one.found = one.ended = time.time() - at
    back, now = memory_is_back(before)
    if not back:
        one.faults.append(f"{now} MiB of the GPU are in use, {before} before the run")
    job.kill()
    again = Job(job.folder, "--max-restarts", 100, "--resume", "auto", new=True)
    if not again.wait(again.trains, HANG) or again.ended:
        one.faults.append("it cannot be resumed")
    one.again = time.time() - at
    return again


def _stop(job: Job, faults: list[str]) -> int | None:
    """Ask it to end; the number of its updates."""
    if job.ended:
        return None
    send(SIGTERM, [job.alive()[LAUNCHER]])
    if not job.wait_for_end(HANG):
        faults.append(f"asked to end, it is there after {HANG:g} s: {job.alive()}")
        return None
    if job.codes != [75] or not job.runs:
        faults.append(f"asked to end, it ends with code {job.codes}: {job.output()[-1000:]!r}")
        return None
    return int(max((job.runs[-1] / "checkpoints").glob("step-*")).name.partition("-")[2])


def _compare(folder: Path, job: Job, updates: int, faults: list[str]) -> None:
    struck = final_weights(job.runs[-1])
    clean = Job(folder, "--set", f"max_updates={updates}", new=True)
    try:
        if not clean.wait_for_end(300.0) or clean.codes != [0]:
            faults.append(
                f"the clean run of {updates} updates ended with {clean.codes}: {clean.output()[-1000:]!r}"
            )
        elif final_weights(clean.runs[-1]) != struck:
            faults.append(f"the weights after {updates} updates are not those of a clean run")
        else:
            print(f"the weights after {updates} updates are those of a clean run, to the bit", flush=True)
    finally:
        clean.kill()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds", type=float, default=270.0, help="no strike begins in the last fifth of them"
    )
    parser.add_argument("--schedules", nargs="*", default=list(STRIKES))
    arguments = parser.parse_args()
    signal.signal(SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left of a run that is cut short
    drawn = random.Random(arguments.seed)
    began = time.monotonic()
    seen: list[Seen] = []
    faults: list[str] = []
    with tempfile.TemporaryDirectory(prefix="at-") as name:
        for number, schedule in enumerate(arguments.schedules, 1):
            deadline = began + 0.8 * arguments.seconds * number / len(arguments.schedules)
            # CUDA graphs where there is a GPU, in one of them.
            graphs = schedule == "1f1b" and os.environ.get("VPIPE_DEVICE") != "cpu"
            more, wrong = attack(
                Path(name).resolve() / schedule,
                schedule,
                drawn,
                deadline,
                {"cuda_graphs": True} if graphs else {},
            )
            seen += more
            faults += [f"{schedule}: {fault}" for fault in wrong]
    print(HEAD, *(one.row() for one in seen), sep="\n")
    tried = [one for one in seen if not any(fault.startswith("not tried") for fault in one.faults)]
    right = sum(not one.faults for one in tried)
    print(f"{right} of {len(tried)} strikes went as they should, in {time.monotonic() - began:.0f} s")
    for fault in faults:
        print(f"WRONG: {fault}")
    sys.exit(0 if right == len(tried) and not faults else 1)


if __name__ == "__main__":
    main()
