"""What the runtime itself costs: an action's overhead, and the making of a weight version.

    python benchmarks/overhead.py [--json]

*An action.* Two processes train a model of two tiny layers, so that nearly nothing is computed, with 1f1b. What a
rank computes for an action over what the bare modules take is the runtime's overhead; the wall clock adds the
waiting for the other rank, which with real layers is hidden behind their computation. *A version.* The
optimizer of half of the benchmark's transformer makes an update in place, and into a new version because a
backward still needs the old one; the difference is compared with a minibatch's forward and backward.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from collections.abc import Callable

import torch
import torch.multiprocessing
import work
from torch import nn

import vpipe
from vpipe.graph import RandomContext, capture
from vpipe.weights import OptimizerWithWeightStashing

MINIBATCHES = 16
UPDATES = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures = {**action_overhead(), **version_cost()}
    if arguments.json:
        print(json.dumps(figures, indent=2))
        return
    for name, value in figures.items():
        print(f"{name:<40} {value:10.3f}")


def median_seconds(work: Callable[[], object], repeats: int) -> float:
    work()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def tiny() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), (torch.randn(2, 8), torch.randn(2, 8))


def action_overhead() -> dict[str, float]:
    """Microseconds of overhead for each action (F, B, SEND, RECV, STEP) of a rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    torch.multiprocessing.spawn(_train_tiny, (port, queue), nprocs=2)
    return queue.get()


def _train_tiny(rank: int, port: int, queue: torch.multiprocessing.SimpleQueue) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    model, batch = tiny()
    with vpipe.Pipeline(
        model,
        batch,
        loss_fn=nn.functional.mse_loss,
        schedule="1f1b",
        minibatches=MINIBATCHES,
        optimizer=lambda params: torch.optim.SGD(params, 0.0, fused=True),
    ) as pipe:
        actions = sum(1 for _ in pipe.schedule.program(rank))
        training = pipe.train(batch for _ in range(MINIBATCHES * (UPDATES + 1)))
        next(training)
        taken = []
        for _ in range(UPDATES):
            start = (time.perf_counter(), time.process_time())
            next(training)
            taken.append((time.perf_counter() - start[0], time.process_time() - start[1]))
        list(training)
    bare = MINIBATCHES * bare_seconds()
    if rank == 0:
        wall, processor = (statistics.median(times) for times in zip(*taken, strict=True))
        undisturbed = statistics.quantiles((processor for _, processor in taken), n=10)[0]
        figures = {
            "actions of an update on a rank": actions,
            "bare modules, us an action": bare / actions * 1e6,
            "overhead, us an action": (processor - bare) / actions * 1e6,
            "overhead, quickest tenth of updates": (undisturbed - bare) / actions * 1e6,
            "wall clock, us an action": wall / actions * 1e6,
        }
        queue.put(figures)


def bare_seconds() -> float:
    """What one rank's part of a minibatch takes, forward and backward, if nothing is around it."""
    model, batch = tiny()
    modules = [stage.build(model) for stage in capture(model, batch, nn.functional.mse_loss).stages([1, 1])]
    fields = dict(zip(("input", "target"), batch, strict=True))

    def bare() -> None:
        values: dict[str, torch.Tensor] = {}
        for module in modules:
            values = module(values, fields, RandomContext())
        values["loss"].backward()

    return median_seconds(bare, 1000) / len(modules)


def version_cost() -> dict[str, float]:
    """Milliseconds of an update in place and with a new version, and the difference as a share of a step."""
    model = work.build_model()
    batch = work.batches(1)[0]
    stage = capture(model, batch).stages([9, 8])[0]
    module = stage.build(model)
    fields = {"ids": batch[0], "labels": batch[1]}

    def forward_and_backward() -> None:
        (output,) = module({}, fields, RandomContext()).values()
        output.backward(torch.ones_like(output))

    compute = median_seconds(forward_and_backward, 7)
    optimizer = OptimizerWithWeightStashing(module.parameters_by_name, work.build_optimizer)
    gradients = [torch.zeros_like(p) for p in optimizer.model_parameters]
    minibatch = 0

    def update(stashing: bool) -> None:
        nonlocal minibatch
        if stashing:
            optimizer.load_new_params(minibatch)
        for parameter, gradient in zip(optimizer.model_parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        if stashing:
            optimizer.release(minibatch)
            minibatch += 1

    in_place = median_seconds(lambda: update(False), 15)
    stashing = median_seconds(lambda: update(True), 15)
    return {
        "update in place, ms": in_place * 1e3,
        "update with a new version, ms": stashing * 1e3,
        "a version's share of a minibatch, %": 100 * (stashing - in_place) / (compute + stashing),
    }


if __name__ == "__main__":
    main()
