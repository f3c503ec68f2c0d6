"""What is reached of the limit over links of several rates, beside the simulator's prediction.

    python -m benchmarks.links --rates 100mbit 1gbit 10gbit

Two ranks on two hosts: network namespaces of this machine, joined by a cable of that rate (needs root, `ip` and `tc`).
Blocks sleep instead of computing, and the ranks are scheduled before all else where that is permitted, so that other
work on this machine hardly delays them. The prediction has nothing from the
run: blocks are profiled by `vpipe.profile` in this process, the cable is measured as `vpipe doctor --machines` does.

The limit of an update is what its busiest rank computes, or what the cable carries one way, if that is longer.
"""

import argparse
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise, repeat
from math import inf
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import vpipe
from tests.faults.hosts import FIRST, enter, two_hosts
from vpipe import Pipeline
from vpipe.cost import Hosts, LinkCost, Plan, Profile
from vpipe.launch.measure import measure
from vpipe.train.host_orders import serve

BLOCKS, FORWARD, BACKWARD = 4, 0.025, 0.050
"""Of the model, and how long each sleeps."""
ROWS, WIDTH = 8192, 32
"""Of a value: 1 MiB, forward and back for each minibatch."""
PARAMETERS = 2**20
"""Of each block: 4 MiB."""
MINIBATCHES = 8
SECOND, PORT = FIRST[:-1] + "2", 29531
TIMEOUT = 100.0


class Case(NamedTuple):
    schedule: str
    replicas: tuple[int, ...]
    updates: int

    @property
    def name(self) -> str:
        return f"`{self.schedule}`, " + ("2 stages" if len(self.replicas) == 2 else "2 replicas")

    @property
    def minibatches(self) -> int | None:
        return None if self.schedule == "vpipe" else MINIBATCHES

    def plan(self) -> Plan:
        partition = (BLOCKS // 2,) * 2 if len(self.replicas) == 2 else (BLOCKS,)
        minibatches = self.minibatches or self.updates
        return Plan(partition, ("keep",) * BLOCKS, self.schedule, self.replicas, minibatches)


CASES = [Case("gpipe", (1, 1), 7), Case("1f1b", (1, 1), 7), Case("vpipe", (1, 1), 50), Case("1f1b", (2,), 7)]


@torch.library.custom_op("benchmarks::asleep", mutates_args=())
def asleep(x: Tensor, forward: float, backward: float) -> Tensor:
    time.sleep(forward)
    return x.clone()


@asleep.register_fake
def _(x: Tensor, forward: float, backward: float) -> Tensor:
    return torch.empty_like(x)


def _set_up(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.seconds = inputs[2]


def _sleep_again(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    time.sleep(ctx.seconds)
    return gradient, None, None


asleep.register_autograd(_sleep_again, setup_context=_set_up)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)  # small: a block is cut off at products
        self.bias = nn.Parameter(torch.zeros(PARAMETERS))

    def forward(self, x: Tensor) -> Tensor:
        return asleep(self.linear(x) + self.bias[: ROWS * WIDTH].view(ROWS, WIDTH), FORWARD, BACKWARD)


def workload() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.set_num_threads(1)
    return nn.Sequential(*(Block() for _ in range(BLOCKS))), (
        torch.zeros(ROWS, WIDTH),
        torch.ones(ROWS, WIDTH),
    )


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.01)


def run(rank: int, namespace: str, orders: Any, results: Any) -> None:
    """The cases that are ordered, on one rank; None ends it."""
    enter(namespace)
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    place = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": FIRST, "MASTER_PORT": 29519}
    os.environ.update({key: str(value) for key, value in place.items()})
    model, batch = workload()
    while (case := orders.get(timeout=TIMEOUT)) is not None:
        if callable(case):
            results.put(case())
            continue
        with Pipeline(
            model,
            batch,
            optimizer=sgd,
            loss_fn=nn.functional.mse_loss,
            schedule=case.schedule,
            minibatches=case.minibatches,
            replicas=case.replicas,
            partition=case.plan().partition,
            timeout=TIMEOUT,
        ) as pipe:
            count = case.updates * (case.minibatches or 1)
            moments = [perf_counter() for _ in pipe.train(repeat(batch, count))]
        taken = [after - before for before, after in pairwise(moments)]
        # An asynchronous run fills and drains its pipeline.
        results.put(
            median(taken[2:]) if case.minibatches else (moments[-5] - moments[9]) / (len(moments) - 14)
        )


def listen() -> None:
    """On the second host: answer the one measurement that follows."""
    listener = socket.create_server((SECOND, PORT))
    threading.Thread(target=serve, args=(listener,), daemon=True).start()


def measure_cable() -> LinkCost:
    """From the first host to the second."""
    with socket.create_connection((SECOND, PORT), TIMEOUT) as link:
        found = measure(link)
    return LinkCost(found.bandwidth, found.latency)


def predict(case: Case, profile: Profile, link: LinkCost) -> tuple[float, float]:
    """Seconds of an update, and its limit."""
    profile = replace(profile, hosts=Hosts(((0,), (1,)), link))
    simulated = vpipe.simulate(profile, case.plan()).step_time
    near = replace(profile, hosts=None, link=LinkCost(inf))
    computing = (
        max(rank.compute for rank in vpipe.simulate(near, case.plan()).ranks)
        * vpipe.simulate(near, case.plan()).step_time
    )
    values = (
        ROWS * WIDTH * 4 * (case.minibatches or 1) if len(case.replicas) == 2 else BLOCKS * PARAMETERS * 4
    )
    return simulated, max(computing, values / link.bandwidth)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rates", nargs="+", default=["100mbit", "1gbit", "10gbit"], help="as `tc` takes them"
    )
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    model, batch = workload()
    profile = vpipe.profile(model, batch, optimizer=sgd, loss_fn=nn.functional.mse_loss, seconds=5.0)
    # On one core a profile has the processor's time, which goes on in no sleep.
    awake = [
        replace(block, forward=block.forward + FORWARD, input_gradient=block.input_gradient + BACKWARD)
        for block in profile.blocks
    ]
    profile = replace(profile, blocks=tuple(awake))
    print(
        "| link | measured, MB/s | what | limit, s | simulated, s | run, s | run / simulated | limit / run |"
    )
    print("|---|---|---|---|---|---|---|---|")
    with two_hosts() as hosts:
        queues = [(context.Queue(), context.Queue()) for _ in hosts.names]
        ranks = [
            context.Process(target=run, args=(rank, name, *queues[rank]), daemon=True)
            for rank, name in enumerate(hosts.names)
        ]
        for process in ranks:
            process.start()

        def order(case: Any, ranks: Sequence[int] = (0, 1)) -> list[Any]:
            for rank in ranks:
                queues[rank][0].put(case)
            return [queues[rank][1].get(timeout=TIMEOUT) for rank in ranks]

        for rate in arguments.rates:
            hosts.slow_down(rate, "64kb" if rate.endswith("mbit") else "256kb")
            order(listen, [1])
            (link,) = order(measure_cable, [0])
            for case in CASES:
                taken = max(order(case))
                simulated, limit = predict(case, profile, link)
                bandwidth = f"{link.bandwidth / 1e6:.1f}"
                print(
                    f"| {rate} | {bandwidth} | {case.name} | {limit:.3f} | {simulated:.3f} | {taken:.3f} "
                    f"| {taken / simulated - 1:+.1%} | {limit / taken:.0%} |",
                    flush=True,
                )
        for orders, _ in queues:
            orders.put(None)
        for process in ranks:
            process.join(TIMEOUT)


if __name__ == "__main__":
    main()
