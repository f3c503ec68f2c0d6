"""BERT-large on four ranks that share one GPU: the limit, every schedule, the guides' settings under a memory cap.

    python benchmarks/gpu.py [--json FILE] [--precision bf16] [--layers 24] [--batch 16] [--parts schedules,guides]

Each rank has a quarter of the card's multiprocessors (MPS) and trains a BERT of the guides' size, sequence 128.
*The limit* is the time of all blocks on one such rank, over four; it is measured with one rank at work, and with all
four at work each on a whole model of its own, which share the card's memory bandwidth and its power. *The cap* is
nine tenths of what PipeDream's setting needs with minibatches of 16, so that this does not fit. Figures are written
to FILE as they come; predictions are the simulator's, from a profile that all four ranks measured at once.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from vpipe.launch.mps import sharing

RANKS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path(tempfile.gettempdir()) / "vpipe-gpu.json")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--parts", default="schedules,guides", help="schedules, guides or both")
    parser.add_argument("--seconds", type=float, default=400.0, help="begin no further case after so long")
    arguments = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with sharing([0] * RANKS) as environments:
        workers = [
            subprocess.Popen(
                [sys.executable, Path(__file__).with_name("gpu_rank.py"), *map(str, _for_rank(arguments))],
                env={
                    **os.environ,
                    **environment,
                    "OMP_NUM_THREADS": "1",
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(RANKS),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                },
            )
            for rank, environment in enumerate(environments)
        ]
        try:
            codes = [worker.wait() for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
    if arguments.json.exists():
        rows = [json.loads(line) for line in arguments.json.read_text().splitlines()]
        Console(width=140).print(table(rows))
        for row in rows:
            if "ratios" in row:
                print(row["case"], {name: round(ratio, 2) for name, ratio in row["ratios"].items()})
    if any(codes):
        sys.exit(f"ranks ended with {codes}")


def _for_rank(arguments: argparse.Namespace) -> list[object]:
    return [
        arguments.json,
        arguments.precision,
        arguments.layers,
        arguments.batch,
        arguments.seconds,
        arguments.parts,
    ]


def table(rows: list[dict[str, object]]) -> Table:
    made = Table(title="one GPU, four ranks", title_justify="left")
    for column in (
        "case",
        "minibatches",
        "batch",
        "samples/s",
        "of limit",
        "predicted",
        "off",
        "peak GiB",
        "foreseen",
    ):
        made.add_column(column, justify="left" if column == "case" else "right")
    for row in rows:
        made.add_row(
            str(row["case"]),
            str(row.get("minibatches") or ""),
            str(row.get("batch") or ""),
            *(_number(row.get(key), form) for key, form in (("samples_per_s", ".1f"), ("of_limit", ".3f"))),
            _number(row.get("predicted"), ".1f"),
            _number(row.get("off"), "+.1%"),
            _peaks(row.get("peak_bytes")),
            _peaks(row.get("foreseen_bytes")) or str(row.get("error", "")),
        )
    return made


def _number(value: object, form: str) -> str:
    return format(value, form) if isinstance(value, float) else ""


def _peaks(values: object) -> str:
    return " ".join(f"{value / 2**30:.2f}" for value in values) if isinstance(values, list) else ""


if __name__ == "__main__":
    main()
