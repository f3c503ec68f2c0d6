"""The costs of the runtime itself: an action's overhead, and the making of a weight version.

    python benchmarks/overhead.py [--json | --profile]

*An action.* Two processes train a model of two tiny layers, so that nearly nothing is computed, with 1f1b. What a
rank computes for an action over what the bare modules take is the runtime's overhead; the wall clock adds the
waiting for the other rank, which with real layers is hidden behind their computation. *A version.* The
optimizer of half of the benchmark's transformer makes an update in place, and into a new version because a
backward still needs the old one; the difference is compared with a minibatch's forward and backward.
`--profile` shows where an action's time goes, by room of the code (the profiler itself makes Python about
twice as slow: read the shares, not the sum).
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
import torch.multiprocessing
import work
from torch import nn

import vpipe
from vpipe.graph import capture
from vpipe.stage import RandomContext, StageModule
from vpipe.weights import OptimizerWithWeightStashing

MINIBATCHES = 16
UPDATES = 40
ROUNDS = 7
"""Training and the bare modules take turns: the machine's pace moves from second to second."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures = train_tiny(profile=True) if arguments.profile else {**train_tiny(), **version_cost()}
    if arguments.json:
        print(json.dumps(figures, indent=2))
        return
    for name, value in figures.items():
        print(f"{name[:66]:<66} {value:10.3f}")


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


def train_tiny(*, profile: bool = False) -> dict[str, float]:
    """Microseconds of overhead for each action (F, B, SEND, RECV, STEP) of a rank, or where they go."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    torch.multiprocessing.spawn(_train_tiny, (port, queue, profile), nprocs=2)
    return queue.get()


def _train_tiny(rank: int, port: int, queue: torch.multiprocessing.SimpleQueue, profile: bool) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    model, batch = tiny()
    bare = BareModules()
    with vpipe.Pipeline(
        model,
        batch,
        loss_fn=nn.functional.mse_loss,
        schedule="1f1b",
        minibatches=MINIBATCHES,
        optimizer=lambda params: torch.optim.SGD(params, 0.0, fused=True),
    ) as pipe:
        actions = sum(1 for _ in pipe.schedule.program(rank))
        training = pipe.train(batch for _ in range(MINIBATCHES * (ROUNDS * UPDATES + 1)))
        next(training)
        profiler = cProfile.Profile()
        rounds = []
        for _ in range(ROUNDS):
            if profile:
                profiler.enable()
            taken = [seconds_of(lambda: next(training)) for _ in range(UPDATES)]
            profiler.disable()
            wall, processor = (statistics.median(times) / actions for times in zip(*taken, strict=True))
            rounds.append((wall, processor, MINIBATCHES * bare.seconds() / actions))
        list(training)
    if rank == 0:
        figures = {
            "actions of an update on a rank": actions,
            "bare modules, us an action": 1e6 * statistics.median(alone for _, _, alone in rounds),
            "overhead, us an action": 1e6 * statistics.median(used - alone for _, used, alone in rounds),
            "overhead, the quickest round": 1e6 * min(used - alone for _, used, alone in rounds),
            "overhead, the slowest round": 1e6 * max(used - alone for _, used, alone in rounds),
            "wall clock, us an action": 1e6 * statistics.median(wall for wall, _, _ in rounds),
        }
        queue.put(by_room(profiler, ROUNDS * UPDATES * actions) if profile else figures)


def seconds_of(work: Callable[[], object]) -> tuple[float, float]:
    """Of the clock and of the processor."""
    start = (time.perf_counter(), time.process_time())
    work()
    return time.perf_counter() - start[0], time.process_time() - start[1]


def by_room(profiler: cProfile.Profile, actions: int) -> dict[str, float]:
    """Microseconds an action spent in each file of vpipe, in torch, in the system's calls, the largest first."""
    rooms: Counter[str] = Counter()
    for (file, _, function), (_, _, own, _, _) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        path = Path(file)
        if "vpipe" in path.parts:
            room = "/".join(path.parts[-2:])
        elif file == "~":
            room = f"built in: {function}"
        else:
            room = "torch, in Python" if "torch" in path.parts else "standard library"
        rooms[room] += own / actions * 1e6
    return dict(rooms.most_common(24))


class BareModules:
    """What the ranks compute for a minibatch, forward and backward, with nothing around it."""

    def __init__(self) -> None:
        model, batch = tiny()
        graph = capture(model, batch, nn.functional.mse_loss)
        self.modules = [StageModule(stage, model) for stage in graph.stages([1, 1])]
        self.fields = dict(zip(("input", "target"), batch, strict=True))

    def __call__(self) -> None:
        values: dict[str, torch.Tensor] = {}
        for module in self.modules:
            values = module(values, self.fields, RandomContext())
        values["loss"].backward()

    def seconds(self) -> float:
        """One rank's part."""
        return median_seconds(self, 300) / len(self.modules)


def version_cost() -> dict[str, float]:
    """Milliseconds of an update in place and with a new version, and the difference as a share of a step."""
    model = work.build_model()
    batch = work.batches(1)[0]
    stage = capture(model, batch).stages([9, 8])[0]
    module = StageModule(stage, model)
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
