"""Many faults in one run, with automatic restart: `make soak`. It must end with the weights of a run without any.

python -m tests.faults.soak [--faults 200] [--seed 0] [--docs docs/reliability.md]
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.end_to_end.command import alive
from tests.faults.runs import failures, final_weights, half_done, shared_memory, train, write_config

RANKS = 2
EVERY = 4
"""Updates between two faults."""
KINDS = ("kill", "segv", "raise", "exit", "stop", "gil")
POINTS = {
    "rendezvous": (0, 1),
    "init": (0, 1),
    "data": (0, 1),
    "fwd_recv": (1,),
    "fwd": (0, 1),
    "fwd_send": (0,),
    "bwd_recv": (0,),
    "bwd": (0, 1),
    "bwd_send": (1,),
    "reduce": (0, 1),
    "step": (0, 1),
    "ckpt_write": (0, 1),
    "ckpt_commit": (0,),
    "eval": (0, 1),
}
"""Where, and on which ranks."""
IN_STEPS = ("data", "fwd_recv", "fwd", "fwd_send", "bwd_recv", "bwd", "bwd_send", "reduce", "step")


def random_faults(count: int, seed: int) -> list[str]:
    """One for each attempt, each some updates after the one before; and a later one, should it not be passed."""
    drawn = random.Random(seed)
    faults = []
    for attempt in range(count):
        point = drawn.choice(list(POINTS))
        # A save that raises ends no run: it is reported, and training goes on.
        kinds = [kind for kind in KINDS if kind != "raise" or not point.startswith("ckpt")]
        step = EVERY * (attempt + 1) + drawn.randrange(EVERY)
        place = {"data": f",minibatch={step}"}.get(point, f",step={step}" if point in IN_STEPS else "")
        rank, kind = drawn.choice(POINTS[point]), drawn.choice(kinds)
        faults.append(f"rank={rank},point={point},kind={kind},attempt={attempt}{place}")
        faults.append(f"rank=0,point=step,kind=kill,attempt={attempt},step={step + EVERY}")
    return faults


def soak(folder: Path, faults: list[str]) -> dict[str, Any]:
    """What became of a run with these faults, compared with one without."""
    count = len(faults) // 2
    updates = EVERY * (count + 3)
    write_config(
        folder,
        RANKS,
        epochs=updates,
        max_updates=updates,
        checkpoint_interval=3,
        evaluation_interval=3,
        heartbeat_limit=2.0,
    )
    clean, reference = train(folder)
    assert clean.code == 0, clean.said
    shared = shared_memory()
    sizes: list[int] = []

    def look(launcher: int) -> None:
        with suppress(OSError):
            status = Path("/proc", str(launcher), "status").read_text().splitlines()
            sizes.extend(int(line.split()[1]) for line in status if line.startswith("VmRSS"))

    started = time.monotonic()
    options = ("--max-restarts", count)
    ended, run = train(folder, ";".join(faults), *options, timeout=600 + 120 * count, look=look)
    assert ended.code == 0, ended.said
    reported = failures(run)
    return {
        "faults": sum("rank" in line for line in reported),
        "seconds": round(time.monotonic() - started),
        "kinds": dict(
            Counter(
                line["how"].partition(" (")[0].partition(" for ")[0] for line in reported if "rank" in line
            )
        ),
        "same weights": final_weights(run) == final_weights(reference),
        "processes left": alive(str(folder)),
        "shared memory left": sorted(shared_memory() - shared),
        "half checkpoints left": half_done(run),
        "checkpoints": len(list((run / "checkpoints").iterdir())),
        "files beside those of a clean run": sorted(
            {path.name for path in run.iterdir()} - {path.name for path in reference.iterdir()}
        ),
        "launcher's memory, MiB": [sizes[len(sizes) // 10] >> 10, sizes[-1] >> 10] if sizes else [],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        result = soak(Path(name).resolve(), random_faults(arguments.faults, arguments.seed))
    for key, value in result.items():
        print(f"{key}: {value}")
    if not result["same weights"] or result["processes left"] or result["faults"] != arguments.faults:
        sys.exit(1)


if __name__ == "__main__":
    main()
