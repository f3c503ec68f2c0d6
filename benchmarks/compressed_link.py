"""Seconds of an update over a slow link, for each mode of `compress`.

    python -m benchmarks.compressed_link --rate 100mbit

Two ranks on two hosts: network namespaces of this machine, joined by a cable of that rate (needs root, `ip` and `tc`).
The model is small and its activations are large, so that the link bounds an update without compression.
"""

import argparse
import multiprocessing
import os
from itertools import repeat
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn

from tests.faults.hosts import FIRST, enter, two_hosts
from vpipe import Pipeline
from vpipe.communication.compression import MODES

MINIBATCHES, ROWS, WIDTH = 4, 1024, 256
"""Of an update; and the numbers that each of them sends forward and gets back: 1 MiB as float32."""
WARM_UP = 3
TIMEOUT = 300.0


def run(rank: int, namespace: str, updates: int, results: Any) -> None:
    """All modes on one rank, one after the other; rank 0 reports them."""
    enter(namespace)
    place = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": FIRST, "MASTER_PORT": 29519}
    os.environ.update({key: str(value) for key, value in place.items()})
    torch.set_num_threads(1)
    for mode in MODES:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        batch = (torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH))
        with Pipeline(
            model,
            batch,
            optimizer=lambda parameters: torch.optim.SGD(parameters, 0.01),
            loss_fn=nn.functional.mse_loss,
            minibatches=MINIBATCHES,
            timeout=TIMEOUT,
            compress=mode,
        ) as pipe:
            moments = [perf_counter() for _ in pipe.train(repeat(batch, updates * MINIBATCHES))]
            sent = pipe.handler.bytes_sent / updates
        seconds = median(b - a for a, b in zip(moments[WARM_UP:], moments[WARM_UP + 1 :], strict=False))
        results.put((mode, seconds, sent))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="100mbit", help="as `tc` takes it")
    parser.add_argument("--updates", type=int, default=15)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with two_hosts() as hosts:
        hosts.slow_down(arguments.rate)
        queues = [context.Queue() for _ in hosts.names]
        ranks = [
            context.Process(target=run, args=(rank, name, arguments.updates, queues[rank]), daemon=True)
            for rank, name in enumerate(hosts.names)
        ]
        for process in ranks:
            process.start()
        print(
            f"| compress | MB that rank 0 sends for an update | s an update at {arguments.rate} |\n|---|---|---|"
        )
        for _ in MODES:
            mode, seconds, sent = queues[0].get(timeout=TIMEOUT)
            print(f"| `{mode}` | {sent / 1e6:.2f} | {seconds:.3f} |", flush=True)
        for process in ranks:
            process.join(TIMEOUT)


if __name__ == "__main__":
    main()
