"""The files and the memory of a run without end: what a rank records of ten million updates, without training them.

    python -m benchmarks.long_run --updates 10000000

One rank holds a small pipeline and reports its updates to the recorder as `vpipe train` does, with `print_frequency` 1,
details every 64 updates and an evaluation every 1,024; then the commands that look at a run read its folder. After the
first 200,000 updates only every sixteenth is reported, which has all that are written by then.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests import models
from vpipe import Pipeline
from vpipe.observe.recorder import Recorder
from vpipe.pipeline.threads import run_ranks
from vpipe.record.run_folder import COMPLETE
from vpipe.system.device_memory import used_memory
from vpipe.system.files import write_json
from vpipe.system.units import show_bytes
from vpipe.weights import optimizer_factory

ALL, STEP = 200_000, 16


def record(folder: Path, updates: int) -> dict[str, Any]:
    """Sizes of the files, and the growth of the process's memory after the first tenth."""
    model, batch, loss_fn = models.sequential()
    found: dict[str, Any] = {}

    def work(world: Any) -> None:
        optimizer = optimizer_factory("sgd", 0.01)
        with Pipeline(model, batch, optimizer=optimizer, loss_fn=loss_fn, stages=1, world=world) as pipe:
            recorder = Recorder(
                pipe, folder, total=updates, samples=4, tokens=1, print_frequency=1, verbose_frequency=64,
                hang_limit=3600.0, prometheus_port=0,
            )  # fmt: skip
            recorder.show = lambda line: None
            recorder._progress._console.quiet = True
            began, after_a_tenth = time.perf_counter(), 0
            made = [*range(min(updates, ALL)), *range(ALL + STEP - 1, updates, STEP)]
            for place, update in enumerate(made):
                recorder.update(update, 2.0 + math.exp(-update / 1e5), 0)
                if update % 1024 == 1023:
                    recorder.evaluation(2.0)
                if place == len(made) // 10:
                    after_a_tenth = used_memory(pipe.device)
            found["microseconds a report"] = round(1e6 * (time.perf_counter() - began) / len(made), 1)
            found["memory gained by the last nine tenths"] = show_bytes(
                used_memory(pipe.device) - after_a_tenth
            )
            summary = recorder.summary(COMPLETE)
            write_json(
                folder / "summary.json", summary | {"schedule": "1f1b", "partition": [4], "blocks": []}
            )
            recorder.write_events()
            recorder.close()

    run_ranks(1, work, timeout=36_000.0)
    for name in ("summary.json", "metrics.jsonl", "output.log.0", "events.0.json", "tensorboard"):
        path = folder / name
        size = sum(each.stat().st_size for each in path.iterdir()) if path.is_dir() else path.stat().st_size
        found[name] = show_bytes(size)
    return found


COMMAND = """
import atexit, sys
from pathlib import Path
from vpipe.cli import main
atexit.register(lambda: print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0], file=sys.stderr))
main()
"""


def look(*command: str) -> str:
    """Seconds and memory of a command, the start of the interpreter included."""
    began = time.perf_counter()
    ended = subprocess.run(
        [sys.executable, "-c", COMMAND, *command],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    seconds = time.perf_counter() - began
    return f"{seconds:.1f} s, {show_bytes(1024 * int(ended.stderr.split()[-1]))}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=10_000_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for what, value in record(folder, options.updates).items():
            print(f"{what}: {value}", flush=True)
        run = str(folder)
        for command in (
            ("top", run, "--once"),
            ("diagnose", run),
            ("report", run, "-o", f"{run}/report.html"),
        ):
            print(f"vpipe {command[0]}: {look(*command)}", flush=True)


if __name__ == "__main__":
    main()
