"""What is reached of the limit over links of several rates, beside the simulator's prediction.

    python -m benchmarks.links --rates 100mbit 1gbit 10gbit

Two or four ranks on two hosts: network namespaces of this machine, joined by a cable of that rate (needs root, `ip` and
`tc`). Ranks with even numbers are on the first, the others on the second:

    2 stages                            0 | 1            2 replicas                         0 | 1
    2 replicas, crossing     stage 0    0 | 1            2 replicas, inside     stage 0     0 | 1
                             stage 1    2 | 3                                   stage 1     2 | 3
    minibatch 0              0 ------------ 3            minibatch 0            0 - 2

So stages that cross send messages and gradients of replicas over the cable, those inside gradients only. Blocks sleep
instead of computing, and the ranks are scheduled before all else where that is permitted, so that other work on this
machine hardly delays them. The prediction has nothing from the run: blocks are profiled by `vpipe.profile` in this
process, the cable is measured as `vpipe doctor --machines` does. Connections share the cable by reno (or `--control`):
what other algorithms make of a link that several connections fill is theirs (docs/many_machines.md).

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
from itertools import count, pairwise, repeat
from math import inf
from pathlib import Path
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
from vpipe.schedule import kind_of
from vpipe.simulate.traffic import host_traffic
from vpipe.train.host_orders import serve

BLOCKS, FORWARD, BACKWARD = 4, 0.025, 0.050
"""Of the model, and how long each sleeps."""
ROWS, WIDTH = 8192, 32
"""Of a value: 1 MiB, forward and back for each minibatch."""
PARAMETERS = 2**20 - WIDTH * (WIDTH + 1)
"""Of each block, beside those of its linear layer: 4 MiB, a bucket of gradients."""
MINIBATCHES = 8
SECOND, PORT = FIRST[:-1] + "2", 29531
TIMEOUT = 100.0


STAGES, REPLICAS, CROSSING, INSIDE = ((0,), (1,)), ((0, 1),), ((0, 1), (3, 2)), ((0, 1), (2, 3))
"""Which ranks run each stage."""
NAMES = {
    STAGES: "2 stages",
    REPLICAS: "2 replicas",
    CROSSING: "2 x 2 replicas, crossing",
    INSIDE: "2 x 2 replicas, inside",
}


class Case(NamedTuple):
    schedule: str
    placement: tuple[tuple[int, ...], ...]
    minibatches: int
    """Of an update."""
    updates: int

    @property
    def name(self) -> str:
        return f"`{self.schedule}`, {NAMES[self.placement]}"

    @property
    def ranks(self) -> int:
        return sum(map(len, self.placement))

    @property
    def synchronous(self) -> bool:
        return kind_of(self.schedule).synchronous

    def settings(self) -> dict[str, Any]:
        """Of a pipeline, and of a plan."""
        stages = len(self.placement)
        counted = "minibatches" if self.synchronous else "update_interval"
        return {
            "schedule": self.schedule,
            "partition": (BLOCKS // stages,) * stages,
            "replicas": tuple(map(len, self.placement)),
            "placement": self.placement,
            counted: self.minibatches,
        }

    def plan(self) -> Plan:
        whole = {"minibatches": self.updates * self.minibatches}  # of an asynchronous run
        return Plan(policies=("keep",) * BLOCKS, **whole | self.settings())


CASES = [
    Case("gpipe", STAGES, 8, 7),
    Case("1f1b", STAGES, 8, 7),
    Case("vpipe", STAGES, 1, 50),
    Case("1f1b", REPLICAS, 8, 7),
    Case("1f1b", INSIDE, 4, 7),
    Case("1f1b", CROSSING, 4, 7),
    Case("1f1b", CROSSING, 5, 7),
    Case("1f1b", CROSSING, 16, 7),
    Case("2bw", CROSSING, 4, 20),
    Case("2bw", CROSSING, 5, 20),
    Case("2bw", CROSSING, 16, 12),
]


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


def run(rank: int, namespace: str, control: str, orders: Any, results: Any) -> None:
    """The cases that are ordered, on one rank; None ends it."""
    enter(namespace)
    Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text(control)  # of this namespace
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    model, batch = workload()
    while (order := orders.get(timeout=10 * TIMEOUT)) is not None:
        case, port = order
        if callable(case):
            results.put(case())
            continue
        place = {"RANK": rank, "WORLD_SIZE": case.ranks, "MASTER_ADDR": FIRST, "MASTER_PORT": port}
        os.environ.update({key: str(value) for key, value in place.items()})
        with Pipeline(
            model, batch, optimizer=sgd, loss_fn=nn.functional.mse_loss, timeout=TIMEOUT, **case.settings()
        ) as pipe:
            moments = [perf_counter() for _ in pipe.train(repeat(batch, case.updates * case.minibatches))]
        taken = [after - before for before, after in pairwise(moments)]
        # An asynchronous run fills and drains its pipeline.
        filled, drains = case.updates // 5, max(2, case.updates // 10)
        results.put(
            median(taken[2:])
            if case.synchronous
            else (moments[-drains] - moments[filled - 1]) / (case.updates - drains - filled + 1)
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
    hosts = tuple(tuple(range(host, case.ranks, 2)) for host in range(2))
    profile, plan = replace(profile, hosts=Hosts(hosts, link)), case.plan()
    found = vpipe.simulate(profile, plan).step_time
    unlinked = vpipe.simulate(replace(profile, hosts=None, link=LinkCost(inf)), plan)
    computing = unlinked.step_time * max(rank.compute for rank in unlinked.ranks)
    carried = max(host.seconds for host in host_traffic(profile, plan)) * case.minibatches
    return found, max(computing, carried)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rates", nargs="+", default=["100mbit", "1gbit", "10gbit"], help="as `tc` takes them"
    )
    parser.add_argument("--only", default="", help="cases with this in their name")
    parser.add_argument("--control", default="reno", help="congestion control of TCP: reno, cubic, bbr")
    parser.add_argument("--times", type=int, default=1, help="that each case is run: the median counts")
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
        "| link | measured, MB/s | what | minibatches | limit, s | simulated, s | run, s | run / simulated "
        "| limit / run |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    with two_hosts() as hosts:
        queues = [(context.Queue(), context.Queue()) for _ in range(4)]
        ranks = [
            context.Process(
                target=run, args=(rank, hosts.names[rank % 2], arguments.control, *queues[rank]), daemon=True
            )
            for rank in range(4)
        ]
        for process in ranks:
            process.start()

        ports = count(29600)  # that of the case before may still be held

        def order(case: Any, ranks: Sequence[int]) -> list[Any]:
            port = next(ports)
            for rank in ranks:
                queues[rank][0].put((case, port))
            return [queues[rank][1].get(timeout=TIMEOUT) for rank in ranks]

        for rate in arguments.rates:
            hosts.slow_down(rate, "64kb" if rate.endswith("mbit") else "256kb")
            order(listen, [1])
            (link,) = order(measure_cable, [0])
            for case in (case for case in CASES if arguments.only in case.name):
                taken = median(max(order(case, range(case.ranks))) for _ in range(arguments.times))
                simulated, limit = predict(case, profile, link)
                bandwidth = f"{link.bandwidth / 1e6:.1f}"
                print(
                    f"| {rate} | {bandwidth} | {case.name} | {case.minibatches} | {limit:.3f} "
                    f"| {simulated:.3f} | {taken:.3f} | {taken / simulated - 1:+.1%} | {limit / taken:.0%} |",
                    flush=True,
                )
        for orders, _ in queues:
            orders.put(None)
        for process in ranks:
            process.join(TIMEOUT)


if __name__ == "__main__":
    main()
