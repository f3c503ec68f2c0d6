"""vpipe and its peers on the same work, on this machine, in one go.

    python benchmarks/peers.py [--quick] [--json] [--minibatches 4,8] [--systems limit,vpipe,torch,deepspeed]

Two processes with one thread each train a transformer of 8 layers x 384 (see work.py). `of_limit` is the
share of the limit's speed: every rank computes its part of the same work, updates included, with no
communication and no waiting. All figures are medians over rounds, with their spread. Systems live in
systems/; what is not installed is skipped (systems/deepspeed.py says how to install DeepSpeed).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import sys
from collections.abc import Sequence

import systems
from pool import WorkerError
from rich.console import Console
from rich.table import Table
from rounds import Limits, Race, Row

QUICK = Limits(warm_up=1, rounds=3, steps=1, budget=108, answer=60)
FULL = Limits(warm_up=2, rounds=5, steps=2, budget=3600, answer=300)

# For the processes that the workers come from. One thread; and freed memory stays with the process: giving it
# back and faulting it in again costs up to a fifth of a step, at random, and hides what is compared.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
}


def main() -> None:
    arguments = parse_arguments()
    limits = QUICK if arguments.quick else FULL
    limits = limits._replace(rounds=arguments.rounds or limits.rounds)
    minibatches = arguments.minibatches or ([4] if arguments.quick else [4, 8])
    os.environ.update(ENVIRONMENT)
    # A plain exit, so that the worker processes are ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    progress = Console(stderr=True, highlight=False, markup=False)
    try:
        with Race(arguments.systems, limits, progress.print) as race:
            rows = race.run(minibatches)
    except WorkerError as error:
        sys.exit(f"there is nothing to compare with: the limit failed: {error}")
    if arguments.json:
        print(json.dumps([row._asdict() for row in rows], indent=2))
    else:
        for count, group in itertools.groupby(rows, key=lambda row: row.minibatches):
            Console().print(table(count, list(group)))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="vpipe and its peers on the same work, on this machine")
    parser.add_argument("--quick", action="store_true", help="4 minibatches a step only; under two minutes")
    parser.add_argument("--json", action="store_true", help="print the rows as a JSON list")
    parser.add_argument("--minibatches", type=counts, help="minibatches a step, such as 4,8")
    parser.add_argument("--systems", type=chosen_systems, default=systems.names(), help="such as torch,vpipe")
    parser.add_argument("--rounds", type=positive, help="rounds at most (5; with --quick 3)")
    return parser.parse_args()


def chosen_systems(text: str) -> list[str]:
    """Names of systems; the limit is always among them."""
    known = systems.names()
    chosen = text.split(",")
    for name in chosen:
        if name not in known:
            raise argparse.ArgumentTypeError(f"unknown system {name!r} (there are {', '.join(known)})")
    return [name for name in known if name in chosen or name == "limit"]


def counts(text: str) -> list[int]:
    return [positive(one) for one in text.split(",")]


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def table(minibatches: int, rows: Sequence[Row]) -> Table:
    """The rows of one number of minibatches for people: the limits, then the others, fastest first."""
    made = Table(
        title=f"{minibatches} minibatches a step",
        caption=f"medians, ± half the interquartile range; rounds: {rows[0].rounds}",
    )
    for column in ("system", "schedule", "updates"):
        made.add_column(column, no_wrap=True)
    for column in ("samples/s", "of limit"):
        made.add_column(column, justify="right", no_wrap=True)
    limits = [row for row in rows if row.system == "limit"]
    others = [row for row in rows if row.system != "limit"]
    for row in [*limits, *sorted(others, key=lambda row: -row.of_limit)]:
        made.add_row(
            row.system,
            row.schedule,
            row.updates,
            f"{row.samples_per_s:.2f} ±{half(row.samples_per_s_spread):.2f}",
            f"{row.of_limit:.3f} ±{half(row.of_limit_spread):.3f}",
            end_section=row is limits[-1],
        )
    return made


def half(spread: tuple[float, float]) -> float:
    first, third = spread
    return (third - first) / 2


if __name__ == "__main__":
    main()
