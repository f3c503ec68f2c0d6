"""How long the simulator and the planner take at their largest: processor seconds and memory of the commands.

    python benchmarks/speed.py [simulate] [plan] [--schedules 1f1b,zb-v]

*simulate*: 1,024 stages with 4,096 minibatches, and 64 with 256. *plan*: 400 blocks on 64 ranks, of two kinds as a
transformer's or all different, under a memory that keeps everything, under one in which blocks have to be
recomputed or swapped, and under one in which no schedule fits. Every figure is that of one `vpipe` command, the
imports (told first) included.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from random import Random

from vpipe.cost import BlockCost, DeviceCost, LinkCost, Plan, Profile, write_plan, write_profile
from vpipe.schedule import NAMES

SIZES = ((1024, 4096), (64, 256))
BLOCKS, RANKS = 400, 64
ROOMY, TIGHT, TOO_LITTLE = "64GiB", "8GiB", "1GiB"
REFUSED = 2
"""The exit code of a command that was refused."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=["simulate", "plan"], help="simulate, plan")
    parser.add_argument("--schedules", default=",".join(NAMES), help="names, with commas between them")
    arguments = parser.parse_args()
    schedules = arguments.schedules.split(",")
    with tempfile.TemporaryDirectory() as folder:
        bare = spent(Path(folder), "--help")[0]
        print(f"`vpipe --help`: {bare:.1f} s\n", flush=True)
        if "simulate" in arguments.parts:
            simulations(Path(folder), schedules)
        if "plan" in arguments.parts:
            auto = ["auto"] if arguments.schedules == ",".join(NAMES) else []
            plans(Path(folder), [*schedules, *auto])


def spent(folder: Path, *words: str, code: int = 0) -> tuple[float, float]:
    """Processor seconds and mebibytes of a command that ends with this exit code."""
    command = subprocess.Popen(
        [sys.executable, "-m", "vpipe", *words],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL if code else None,
    )
    _, status, usage = os.wait4(command.pid, 0)
    command.returncode = os.waitstatus_to_exitcode(status)
    if command.returncode != code:
        raise SystemExit(f"vpipe {' '.join(words)} ended with {command.returncode}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def simulations(folder: Path, schedules: Iterable[str]) -> None:
    heads = [f"{stages} stages, {minibatches} minibatches" for stages, minibatches in SIZES]
    print("| `vpipe simulate`, schedule | " + " | ".join(f"{head}: s | MiB" for head in heads) + " |")
    print("|---" * (1 + 2 * len(heads)) + "|")
    block = BlockCost("block", 0.010, 0.011, 0.009, 0.002, 10**7, 10**6, 10**7, version=0.001)
    for schedule in schedules:
        cells = []
        for stages, minibatches in SIZES:
            link = LinkCost(1e10, 1e-5)
            write_profile(
                Profile((block,) * stages, DeviceCost(2**40, 1e10, 1e10), link, 8), folder / "profile.json"
            )
            write_plan(Plan((1,) * stages, ("keep",) * stages), folder / "plan.json")
            words = ["--schedule", schedule, "--minibatches", str(minibatches), "--json"]
            seconds, memory = spent(
                folder, "simulate", "--profile", "profile.json", "--plan", "plan.json", *words
            )
            cells += [f"{seconds:.1f}", f"{memory:.0f}"]
        print(f"| {schedule} | {' | '.join(cells)} |", flush=True)
    print()


def plans(folder: Path, schedules: Iterable[str]) -> None:
    cases = [
        (kinds, memory) for kinds in ("two kinds", "all different") for memory in (ROOMY, TIGHT, TOO_LITTLE)
    ]
    print(f"| `vpipe plan` of {BLOCKS} blocks on {RANKS} ranks, schedule | ", end="")
    print(" | ".join(f"{kinds}, {memory}: s" for kinds, memory in cases) + " |")
    print("|---" * (1 + len(cases)) + "|")
    for schedule in schedules:
        cells = []
        for kinds, memory in cases:
            write_profile(profile(different=kinds == "all different"), folder / "profile.json")
            words = ["--stages", str(RANKS), "--memory", memory, "--schedule", schedule, "--json"]
            code = REFUSED if memory == TOO_LITTLE else 0
            cells.append(f"{spent(folder, 'plan', '--profile', 'profile.json', *words, code=code)[0]:.1f}")
        print(f"| {schedule} | {' | '.join(cells)} |", flush=True)


def profile(different: bool) -> Profile:
    """Attention and feed-forward in turn; all different: each up to a fifth larger or smaller."""
    random = Random(1)

    def block(number: int) -> BlockCost:
        size = random.uniform(0.8, 1.2) if different else 1.0
        weight = 1.0 if number % 2 else 2.0
        forward, kept = 0.004 * weight * size, 6e7 / weight * size
        return BlockCost(
            f"block {number}", forward, forward, 0.9 * forward, 0.0005 * weight, round(kept),
            8_000_000, round(1.6e7 * weight * size), deferred_bytes=round(kept / 3),
        )  # fmt: skip

    device, link = DeviceCost(2**36, 1.2e10, 1.2e10, 2e-5), LinkCost(1e10, 1e-5)
    return Profile(tuple(block(number) for number in range(BLOCKS)), device, link, 8)


if __name__ == "__main__":
    main()
