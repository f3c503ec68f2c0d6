"""The time of a step by its uses: computing, updating, sending, waiting, and how quick the computing is.

    python benchmarks/whereabouts.py [--minibatches 8] [--rounds 5] [--json]

Two processes do the work of peers.py. In every round the limit runs a step, then each of vpipe's schedules; a
rank's shares are those of its own wall clock. `pace` is the computing time of both ranks together over that
of the limit in the same round: above 1, the same work took longer beside the other rank than alone.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from peers import ENVIRONMENT
from rich.console import Console
from rich.table import Table
from systems import limit, vpipe

from vpipe.observe.figures import figures_of

SCHEDULES = ("1f1b", "zb-h1", "zb-v", "2bw", "pipedream")
LIMITS = {"pipedream": "minibatch"}
WARM_UP = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minibatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free.getsockname()[1]),
        }
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    torch.multiprocessing.spawn(measure, (arguments.minibatches, arguments.rounds, queue), nprocs=2)
    rows = summarise([queue.get() for _ in range(2)])
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return
    table = Table(title=f"{arguments.minibatches} minibatches a step, medians of {arguments.rounds} rounds")
    for column in rows[0]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(value if isinstance(value, str) else f"{value:.3f}" for value in row.values()))
    Console(width=120).print(table)


def measure(rank: int, minibatches: int, rounds: int, queue: Any) -> None:
    os.environ["RANK"] = str(rank)
    torch.set_num_threads(1)
    pipes = {name: vpipe.SYSTEM.build(rank, 2, minibatches, name) for name in SCHEDULES}
    limits = {name: limit.SYSTEM.build(rank, 2, minibatches, name) for name in ("step", "minibatch")}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in SCHEDULES}
    for number in range(WARM_UP + rounds):
        alone = {}
        for name, runner in limits.items():
            dist.barrier()
            started = time.perf_counter()
            runner.step()
            alone[name] = time.perf_counter() - started
        for name, runner in pipes.items():
            dist.barrier()
            before = figures_of(runner.pipe)
            runner.step()
            taken = figures_of(runner.pipe).since(before)
            if number >= WARM_UP:
                figures = {
                    part: getattr(taken, part) for part in ("seconds", "forward", "backward", "update")
                }
                found[name].append(
                    figures
                    | {"send": taken.send, "wait": taken.wait, "limit": alone[LIMITS.get(name, "step")]}
                )
    queue.put((rank, found))
    for runner in pipes.values():
        runner.close()
    dist.destroy_process_group()


def summarise(ranks: list[tuple[int, dict[str, list[dict[str, float]]]]]) -> list[dict[str, Any]]:
    rows = []
    (_, first), (_, second) = sorted(ranks)
    for name in SCHEDULES:
        rounds = list(zip(first[name], second[name], strict=True))
        row: dict[str, Any] = {"schedule": name}
        for rank in (0, 1):
            for part in ("update", "send", "wait"):
                row[f"{part} {rank}"] = statistics.median(
                    both[rank][part] / both[rank]["seconds"] for both in rounds
                )
        computing = [sum(one["forward"] + one["backward"] + one["update"] for one in both) for both in rounds]
        limits = [sum(one["limit"] for one in both) for both in rounds]
        row["pace"] = statistics.median(mine / alone for mine, alone in zip(computing, limits, strict=True))
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
