"""Rounds of measurements: every stage runs each kind of work in the order of a pipeline, and its times are kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import perf_counter

import torch

from vpipe.profile.measured_stage import Interval, MeasuredStage
from vpipe.stage import StageModule
from vpipe.stage.host_store import HostStore, make_store
from vpipe.stage.swap import Swap

FORWARD, BACKWARD, UPDATE, VERSION = "F", "B", "STEP", "VERSION"
SECOND_BACKWARD = "B that adds to the gradients of another"
SPLIT_FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = "F of a split module", "I", "W"
RECOMPUTING_FORWARD, RECOMPUTING_BACKWARD = "F of a module that recomputes", "B of a module that recomputes"
SPLIT_RECOMPUTING = ("F of a split module that recomputes", "I of it", "W of it")
HOST, HOST_SWAPPING = "the host's part of F and B", "the same of a module that swaps"

WARM = 2
SLOW = 10.0
"""Seconds of a round of which one is enough, and one to warm up: it takes far longer than any disturbance."""
SWAPPING_ROUNDS = 7


@torch.random.fork_rng(devices=[])
def run_round(stages: Sequence[MeasuredStage]) -> None:
    """A training step of two minibatches over all stages, one with backward split, and both with all recomputed.

    In the order of a pipeline, so that caches are filled with the other stages' data, as they are there.
    """
    for stage in stages:
        stage.intervals[FORWARD].append(stage.forward(stage.whole))
    for stage in reversed(stages):
        stage.intervals[BACKWARD].append(stage.backward())
    for stage in stages:
        stage.intervals[FORWARD].append(stage.forward(stage.whole))
    for stage in reversed(stages):
        stage.intervals[SECOND_BACKWARD].append(stage.backward())
    for stage in stages:
        stage.intervals[UPDATE].append(stage.update())
    for stage in stages:
        stage.intervals[SPLIT_FORWARD].append(stage.forward(stage.split))
    for stage in reversed(stages):
        stage.intervals[INPUT_GRADIENT].append(stage.backward())
        stage.intervals[WEIGHT_GRADIENT].append(stage.weight_gradients())
    for stage in stages:
        stage.intervals[VERSION].append(stage.new_version())
    for stage in stages:
        stage.intervals[RECOMPUTING_FORWARD].append(stage.forward(stage.recomputing))
    for stage in reversed(stages):
        stage.intervals[RECOMPUTING_BACKWARD].append(stage.backward())
        stage.weights.skip()
    forward, first, second = SPLIT_RECOMPUTING
    for stage in stages:
        stage.intervals[forward].append(stage.forward(stage.split_recomputing))
    for stage in reversed(stages):
        stage.intervals[first].append(stage.backward())
        stage.intervals[second].append(stage.weight_gradients())
        stage.weights.skip()


def run_rounds(stages: Sequence[MeasuredStage], least: int, most: int, seconds: float) -> None:
    """Some rounds to warm up, then at least `least`, and more (`most` at most) while there is time."""
    for _ in range(WARM):
        began = perf_counter()
        run_round(stages)
        if perf_counter() - began > SLOW:
            least = 1
            break
    for stage in stages:
        stage.intervals.clear()
    deadline = perf_counter() + seconds
    for number in range(most):
        if number >= least and perf_counter() > deadline:
            break
        run_round(stages)


@torch.random.fork_rng(devices=[])
def measure_swapping(stages: Iterable[MeasuredStage]) -> None:
    """The host's time for F and B on a GPU, with and without swapping.

    As a rule the host is ahead of the GPU. For a swapped block it packs and unpacks every saved tensor and starts every
    copy. Where that makes it slower than the GPU, the rank is slower, though the copies run beside computing.
    """
    for stage in stages:
        store = make_store(stage.device)
        swapping = StageModule(stage.stage, stage.whole, swap=stage.stage.blocks, compile=stage.compile)
        for _ in range(SWAPPING_ROUNDS):
            stage.intervals[HOST].append(_host_interval(stage, stage.whole, store))
            stage.intervals[HOST_SWAPPING].append(_host_interval(stage, swapping, store))


def _host_interval(stage: MeasuredStage, module: StageModule, store: HostStore) -> Interval:
    torch.cuda.synchronize(stage.device)  # the host never has to wait for room in the queue
    swap = Swap(store)
    start = perf_counter()
    store.settle()
    stage.forward(module, swap)
    swap.leave()
    swap.fetch()
    stage.backward()
    end = perf_counter()
    stage.weights.skip()
    return start, end
