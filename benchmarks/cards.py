"""Everything that needs several cards, checked in some minutes; prints a table to send back.

    python benchmarks/cards.py [--json results.json]             all cards that this process sees
    torchrun ... benchmarks/cards.py                              cards of several hosts, a rank for each
    python benchmarks/cards.py --cpu [--ranks 2] [--quick]        the same without cards, over shared memory and gloo

1. The cards, their places, and the channel that vpipe chooses between each two of them.
2. Bandwidth and latency of each pair over each channel that it has: CUDA IPC, NCCL, pinned host memory.
3. An all-reduce over all cards, and the memory that NCCL takes.
4. Every schedule, over both kinds of channels, against the plain model in float64.
5. A transformer's share of the limit: computing over all of the time.

Each table is printed, and the file written anew, as soon as it is measured: if something hangs or fails, what was
measured before is there, and the last line that begins with "..." says where.

With one card two ranks share it (CUDA IPC, pinned memory), and what needs two is said to be left out.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from vpipe.launch.mps import count_gpus, sharing

PARTS = ("pairs", "all-reduce", "schedules", "limit")
LIMIT = 900.0
"""Seconds after which the ranks are killed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="ranks on the CPU: a check of this script")
    parser.add_argument("--ranks", type=int, help="default: one for each card, two where there are fewer")
    parser.add_argument("--quick", action="store_true", help="small messages and models")
    parser.add_argument("--parts", default=",".join(PARTS), help="of it, separated by commas (default: all)")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: there is no {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        from cards_rank import run_rank

        run_rank(cpu=arguments.cpu, quick=arguments.quick, parts=parts, file=arguments.json)
        return
    cards = 0 if arguments.cpu else count_gpus()
    if not cards and not arguments.cpu:
        sys.exit("there is no NVIDIA GPU here: run it where there are some, or with --cpu")
    ranks = arguments.ranks or max(2, cards)
    if ranks < 2:
        parser.error("--ranks: give 2 or more")
    environments: AbstractContextManager[Sequence[Mapping[str, str]]] = (
        sharing([rank % cards for rank in range(ranks)]) if cards else nullcontext([{}] * ranks)
    )
    with environments as shares:
        codes = run_ranks(shares)
    if any(code != 0 for code in codes):
        sys.exit(
            f"ranks ended with {codes} (None: it did not end); please send what was printed, with this line"
        )


def run_ranks(shares: Sequence[Mapping[str, str]]) -> list[int | None]:
    """This program again, as so many ranks with these additional variables; their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "WORLD_SIZE": str(len(shares)),
        "LOCAL_WORLD_SIZE": str(len(shares)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, *sys.argv], env={**common, **own, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank, own in enumerate(shares)
    ]
    deadline = time.monotonic() + LIMIT
    try:
        # The others end soon after one that failed: they wait for it in vain.
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            if any(rank.poll() for rank in ranks):
                deadline = min(deadline, time.monotonic() + 20.0)
            time.sleep(0.2)
        return [rank.poll() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


if __name__ == "__main__":
    main()
