"""Rounds of measurements, and the times of blocks that follow from them.

Every stage runs each kind of work in the order of a pipeline. Of each kind of blocks the medians count; what a call
takes in addition to its blocks is counted apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import median, quantiles
from time import perf_counter
from typing import NamedTuple

import torch

from vpipe.cost import SWAP, HostCost
from vpipe.profile.measured_stage import Interval, MeasuredStage, seconds
from vpipe.stage import StageModule
from vpipe.stage.graph_choice import LaunchTimes
from vpipe.stage.host_store import HostStore, make_store
from vpipe.stage.swap import Swap
from vpipe.system.console import Report, unreported

FORWARD, BACKWARD, UPDATE, VERSION = "F", "B", "STEP", "VERSION"
SECOND_BACKWARD = "B that adds to the gradients of another"
SPLIT_FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = "F of a split module", "I", "W"
RECOMPUTING_FORWARD, RECOMPUTING_BACKWARD = "F of a module that recomputes", "B of a module that recomputes"
SPLIT_RECOMPUTING = ("F of a split module that recomputes", "I of it", "W of it")
HOST, HOST_SWAPPING = "the host's part of F and B beside a store", "the same of a module that swaps"
LAUNCH, LAUNCH_UPDATE = "the host's part of F and B", "the host's part of STEP"
LAUNCH_RECOMPUTING, LAUNCH_SPLIT = "the same of a module that recomputes", "the same of a split module"

WARM = 2
SLOW = 10.0
"""Seconds of a round of which one is enough, and one to warm up: it takes far longer than any disturbance."""
HOST_ROUNDS, LAUNCH_ROUNDS = 7, 5
SMALLEST = 5e-7
"""Seconds that a GPU's events can tell apart: no forward and no backward counts as less."""


@torch.random.fork_rng(devices=[])
def run_round(stages: Sequence[MeasuredStage]) -> None:
    """A training step of two minibatches over all stages, one with backward split, and both with all recomputed.

    In the order of a pipeline, so that caches are filled with the other stages' data, as they are there.
    """
    _run_minibatch(stages, "whole", FORWARD, BACKWARD)
    _run_minibatch(stages, "whole", FORWARD, SECOND_BACKWARD)
    for stage in stages:
        stage.intervals[UPDATE].append(stage.update())
    _run_minibatch(stages, "split", SPLIT_FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)
    for stage in stages:
        stage.intervals[VERSION].append(stage.new_version())
    for module, phases in (
        ("recomputing", (RECOMPUTING_FORWARD, RECOMPUTING_BACKWARD)),
        ("split_recomputing", SPLIT_RECOMPUTING),
    ):
        _run_minibatch(stages, module, *phases)
        for stage in stages:
            stage.weights.skip()


def _run_minibatch(
    stages: Sequence[MeasuredStage], module: str, forward: str, backward: str, *weight_gradients: str
) -> None:
    """Forward and backward of a module of each stage, whose times are those of the phases."""
    for stage in stages:
        stage.intervals[forward].append(stage.forward(getattr(stage, module)))
    for stage in reversed(stages):
        stage.intervals[backward].append(stage.backward())
        for phase in weight_gradients:
            stage.intervals[phase].append(stage.weight_gradients())


def run_rounds(
    turns: Sequence[Sequence[MeasuredStage]],
    least: int,
    most: int,
    duration: float,
    report: Report = unreported,
) -> None:
    """Some rounds of all turns to warm up, then at least `least`, and more (`most` at most) while there is time."""
    report(0.0, "running the blocks for the first time")
    for _ in range(WARM):
        began = perf_counter()
        run_turns(turns)
        if perf_counter() - began > SLOW:
            least = 1
            break
    for stages in turns:
        for stage in stages:
            stage.intervals.clear()
    began = perf_counter()
    for number in range(most):
        elapsed = perf_counter() - began
        if number >= least and elapsed > duration:
            break
        both = min(number / least, elapsed / duration) if duration else number / least
        report(max(number / most, both), f"measuring the blocks, round {number + 1}")
        run_turns(turns)


def run_turns(turns: Iterable[Sequence[MeasuredStage]]) -> None:
    """A round of each: of stages that share weights only one may be in a round."""
    for stages in turns:
        run_round(stages)


@torch.random.fork_rng(devices=[])
def measure_swapping(stages: Iterable[MeasuredStage]) -> None:
    """The host's time for F and B on a GPU, with and without swapping.

    As a rule the host is ahead of the GPU. For a swapped block it packs and unpacks every saved tensor and starts every
    copy. Where that makes it slower than the GPU, the rank is slower, though the copies run beside computing.
    """
    for stage in stages:
        store = make_store(stage.device)
        swapping = StageModule(
            stage.stage,
            stage.whole,
            policies=dict.fromkeys(stage.stage.blocks, SWAP),
            compile=stage.compile,
        )
        for _ in range(HOST_ROUNDS):
            for phase, module in ((HOST, stage.whole), (HOST_SWAPPING, swapping)):
                stage.intervals[phase].append(_launch(stage, partial(_run_swapping, stage, module, store)))
                stage.weights.skip()


def _run_swapping(stage: MeasuredStage, module: StageModule, store: HostStore) -> None:
    swap = Swap(store)
    store.settle()
    stage.forward(module, swap)
    swap.leave()
    swap.fetch()
    stage.backward()


@torch.random.fork_rng(devices=[])
def measure_launching(stages: Iterable[MeasuredStage]) -> None:
    """The host's time for F, B and STEP of a GPU, which does not wait for the device."""
    for stage in stages:
        modules = (LAUNCH, stage.whole), (LAUNCH_RECOMPUTING, stage.recomputing), (LAUNCH_SPLIT, stage.split)
        for _ in range(LAUNCH_ROUNDS):
            for phase, module in modules:
                stage.intervals[phase].append(_launch(stage, partial(_run, stage, module)))
                if phase is LAUNCH:
                    stage.intervals[LAUNCH_UPDATE].append(_launch(stage, stage.update))
                stage.weights.skip()


def _run(stage: MeasuredStage, module: StageModule) -> None:
    stage.forward(module)
    stage.backward()
    if module is stage.split:
        stage.weight_gradients()


def _launch(stage: MeasuredStage, work: Callable[[], object]) -> Interval:
    if stage.device.type == "cuda":
        torch.cuda.synchronize(stage.device)  # the host never has to wait for room in the queue
    start = perf_counter()
    work()
    return start, perf_counter()


@torch.random.fork_rng(devices=[])
def host_is_slower(stage: MeasuredStage) -> bool:
    """Whether a GPU waits for its host, by the last of some minibatches: then CUDA graphs gain."""
    if stage.device.type != "cuda":
        return False
    for _ in range(WARM + 1):
        times = LaunchTimes(stage.device)
        with times.timing():
            stage.forward(stage.whole)
            stage.backward()
        stage.weights.skip()
    return times.host_is_slower()


class CallTimes(NamedTuple):
    """Seconds that a call takes in addition to the blocks that it runs."""

    forward: float = 0.0
    backward: float = 0.0
    update: float = 0.0
    host: HostCost | None = None


NO_CALLS = CallTimes()


class BlockTimes(NamedTuple):
    """Seconds of a kind of block, under the names of `BlockCost`."""

    forward: float
    input_gradient: float
    weight_gradient: float
    update: float
    spread: float
    version: float
    splitting: float
    accumulating: float
    recomputing: float | None
    split_recomputing: float | None
    swapping: float
    host: HostCost | None


def call_times(singles: Sequence[Sequence[MeasuredStage]], run: MeasuredStage) -> CallTimes:
    """From blocks that were run one by one, and a stage of some of the same kinds."""

    def of(phase: str) -> float:
        one_by_one = sum(median(_pooled(stages, phase)) for stages in singles)
        return max(0.0, (one_by_one - median(_pooled([run], phase))) / (len(singles) - 1))

    host = HostCost(of(LAUNCH), of(LAUNCH_UPDATE)) if run.intervals[LAUNCH] else None
    return CallTimes(of(FORWARD), of(BACKWARD), of(UPDATE), host)


def block_times(stages: Sequence[MeasuredStage], calls: CallTimes = NO_CALLS) -> BlockTimes:
    """Medians over the rounds of all stages of a kind, without the cost of the calls.

    A time that is a difference of medians can come out negative: the noise is larger than the time. It then counts as
    the smallest that can be measured, or as not known where the planner would take it for free, and `spread` shows how
    far off it was.
    """

    def middle(phase: str) -> float:
        return median(_pooled(stages, phase))

    forward, backward, update = middle(FORWARD), middle(BACKWARD), middle(UPDATE)
    first, second = middle(INPUT_GRADIENT), middle(WEIGHT_GRADIENT)
    split = middle(SPLIT_FORWARD) + first + second
    recomputing = middle(RECOMPUTING_FORWARD) + middle(RECOMPUTING_BACKWARD) - forward - backward
    split_recomputing = sum(map(middle, SPLIT_RECOMPUTING)) - split
    own_forward, own_backward = forward - calls.forward, backward - calls.backward
    noise = -min(own_forward, own_backward, recomputing, split_recomputing)
    # Most schedules run backward whole: the split one gives the shares, and its additional time.
    share = first / (first + second) if first + second else 1.0
    input_gradient = max(SMALLEST, own_backward) * share
    swapping = 0.0
    if swapped := _pooled(stages, HOST_SWAPPING):
        swapping = max(0.0, median(swapped) - max(middle(HOST), forward + backward))
    return BlockTimes(
        forward=max(SMALLEST, own_forward),
        input_gradient=input_gradient,
        weight_gradient=max(SMALLEST, own_backward) - input_gradient,
        update=max(0.0, update - calls.update),
        spread=_spread(stages, noise),
        version=max(0.0, middle(VERSION) - update),
        splitting=max(0.0, split - forward - backward),
        accumulating=max(0.0, middle(SECOND_BACKWARD) - backward),
        recomputing=recomputing if recomputing > 0 else None,
        split_recomputing=split_recomputing if split_recomputing > 0 else None,
        swapping=swapping,
        host=_host_cost(stages, calls.host or HostCost(0.0)) if stages[0].intervals[LAUNCH] else None,
    )


def _host_cost(stages: Sequence[MeasuredStage], calls: HostCost) -> HostCost:
    minibatch, update, recomputing, split = (
        median(_pooled(stages, phase)) for phase in (LAUNCH, LAUNCH_UPDATE, LAUNCH_RECOMPUTING, LAUNCH_SPLIT)
    )
    return HostCost(
        minibatch=max(0.0, minibatch - calls.minibatch),
        update=max(0.0, update - calls.update),
        recomputing=max(0.0, recomputing - minibatch),
        splitting=max(0.0, split - minibatch),
    )


def _spread(stages: Sequence[MeasuredStage], noise: float) -> float:
    """The range of the middle half of the times of F and B, at least `noise`, as a share of their median."""
    both = [
        seconds(forward) + seconds(backward)
        for stage in stages
        for forward, backward in zip(stage.intervals[FORWARD][::2], stage.intervals[BACKWARD], strict=True)
    ]
    low, _, high = quantiles(both, n=4) if len(both) > 1 else [0.0, 0.0, 0.0]
    return max(high - low, noise) / median(both) if median(both) else 0.0


def _pooled(stages: Sequence[MeasuredStage], phase: str) -> list[float]:
    return [seconds(interval) for stage in stages for interval in stage.intervals[phase]]
