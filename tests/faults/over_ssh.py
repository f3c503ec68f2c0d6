"""The time until all processes of two hosts have ended, for a run that `vpipe train` has started by ssh (row 38).

python -m tests.faults.over_ssh
"""

import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.end_to_end.command import end, wait_for_line
from tests.end_to_end.ssh_hosts import ENDLESS, Bench, ssh_hosts
from tests.faults.runs import failures

LIMIT = 10.0
"""The run's `heartbeat_limit`, in seconds."""

Strike = Callable[[Bench, Any], None]


def _process(bench: Bench, host: int, text: str) -> int:
    def command(process: int) -> str:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:90]

    return next(process for process in bench.hosts.processes(host) if text in command(process))


FAULTS: dict[str, Strike] = {
    "Ctrl-C": lambda bench, launcher: os.kill(launcher.pid, signal.SIGINT),
    "the launcher is killed": lambda bench, launcher: launcher.kill(),
    "its ssh is killed": lambda bench, launcher: os.kill(_process(bench, 0, "ssh"), signal.SIGKILL),
    "the agent of the other host is killed": lambda bench, launcher: os.kill(
        _process(bench, 1, "vpipe.train.host"), signal.SIGKILL
    ),
    "a rank of the other host is killed": lambda bench, launcher: os.kill(
        _process(bench, 1, "-m vpipe train"), signal.SIGKILL
    ),
    "the cable between the hosts is cut": lambda bench, launcher: bench.hosts.network.cut(),
}


def measure_fault(strike: Strike, folder: Path) -> tuple[float | None, float, str]:
    """Seconds until it was found, where the launcher lives, and until nothing was left; what the launcher named."""
    (folder / "ssh").mkdir(parents=True)
    with ssh_hosts(folder / "ssh") as hosts:
        bench = Bench(hosts, folder / "work")
        hosts.serve(1)
        launcher = bench.start(**ENDLESS, heartbeat_limit=LIMIT, checkpoint_interval=0)
        try:
            wait_for_line("Iteration 3", bench.folder)
            began, at = time.monotonic(), time.time()
            strike(bench, launcher)
            while any(hosts.processes(number) for number in (0, 1)):
                time.sleep(0.02)
                assert time.monotonic() - began < 60, "something is left"
            gone = time.monotonic() - began
            launcher.communicate()
        finally:
            end(launcher)
        found = failures(bench.latest)
    return (found[0]["found"] - at if found else None), gone, found[0]["how"] if found else ""


def main() -> None:
    print(f"| fault (`heartbeat_limit` {LIMIT:g} s) | found after (s) | nothing left after (s) | named |")
    print("|---|---|---|---|")
    for fault, strike in FAULTS.items():
        with tempfile.TemporaryDirectory() as folder:
            found, gone, how = measure_fault(strike, Path(folder))
        print(f"| {fault} | {'' if found is None else f'{found:.1f}'} | {gone:.1f} | {how} |", flush=True)


if __name__ == "__main__":
    main()
