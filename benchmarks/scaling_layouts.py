"""One point of docs/scaling.md: the layouts that a number of GPUs allows, each simulated, and what bounds the best one.

A layout has R equal pipelines of p ranks. A host has 8 GPUs: `together` of them hold the same stage of so many
pipelines, and its 8 / `together` stages follow each other:

    host 0   stage 0 of pipelines 0, 1   ...   stage 3 of pipelines 0, 1        together = 2
    host 1   stage 4 of pipelines 0, 1   ...   stage 7 of pipelines 0, 1

Since pipelines are equal, one is simulated (`scaling_pipeline.py`), and the reduction of gradients is added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate
from math import ceil, inf, log2
from pathlib import Path
from typing import NamedTuple

from scaling_models import MEASURED, Model, measured_samples
from scaling_pipeline import (
    ALONE,
    HOST,
    INSIDE,
    LATENCY,
    Card,
    Pipeline,
    Run,
    least_seconds,
    plan_of,
    profile_of,
    run,
)

from vpipe.cost import bucket_count
from vpipe.schedule import kind_of

HOST_MEMORY = 2 * 2**40
"""Bytes of a host, which its GPUs share equally when they swap."""
STAGES = (1, 2, 4, 8, 16, 32, 64)


class Layout(NamedTuple):
    samples: int
    """Of a minibatch."""
    stages: int
    """Ranks of a pipeline."""
    pipelines: int
    together: int
    minibatches: int
    """Of an update, for each pipeline."""


class Measured(NamedTuple):
    """The update of a layout, in seconds."""

    layout: Layout
    run: Run
    seconds: float
    lacks: str
    """What there is too little of: "memory" of the GPU, "host memory", or nothing."""


class Point(NamedTuple):
    """The best layout that fits, or the one that needs least memory if none does."""

    layout: Layout
    lacks: str
    memory: float
    """Bytes of a GPU."""
    seconds: float
    """Of an update, or of as many minibatches where each is an update."""
    shares: dict[str, float]
    """Of that time: what would be gained if it were free, one thing after the other; the rest is computing."""
    memory_gain: float
    """The share of the time that the best layout without a limit of memory would save."""


def layouts(model: Model, gpus: int, schedule: str) -> Iterator[Layout]:
    """Stages are powers of two, at most one for each layer; each pipeline has equally many minibatches of an update."""
    kind = None if schedule == ALONE else kind_of(schedule)
    for stages in STAGES:
        if (stages == 1) != (kind is None) or stages > gpus:
            continue
        if kind is not None and stages * kind.chunks > model.layers:
            continue
        pipelines = gpus // stages
        # Either as much of a pipeline as can be is inside a host, or as many replicas of a stage.
        for together in sorted({max(1, HOST // stages), min(HOST, pipelines)}):
            for samples in model.samples:
                minibatches, rest = divmod(model.batch, samples * pipelines)
                if rest or not minibatches:
                    continue
                if schedule == "2bw" and minibatches < stages:
                    continue  # two versions of the weights would not be enough
                yield Layout(samples, stages, pipelines, together, minibatches)


def best_point(
    model: Model, gpus: int, schedule: str, policy: str, card: float, folder: Path = MEASURED
) -> Point | None:
    """`card`: bytes a second of a host's network card, each way. None: there is no layout."""
    tried = [
        (Pipeline(model, schedule, policy, layout.samples, layout.stages, folder), layout)
        for layout in layouts(model, gpus, schedule)
        if layout.samples in measured_samples(model, folder)
    ]
    tried.sort(key=lambda entry: least_seconds(entry[0], entry[1].minibatches))
    found: list[tuple[Pipeline, Measured]] = []
    limit = inf
    for pipeline, layout in tried:
        if least_seconds(pipeline, layout.minibatches) > limit:
            break  # no later one can be quicker than the best that fits
        measured = measure(pipeline, layout, card)
        found.append((pipeline, measured))
        limit = limit if measured.lacks else min(limit, measured.seconds)
    if not found:
        return None
    fitting = [entry for entry in found if not entry[1].lacks]
    if fitting:
        pipeline, best = min(fitting, key=lambda entry: entry[1].seconds)
    else:
        pipeline, best = min(found, key=lambda entry: entry[1].run.memory)
    quickest = min(measured.seconds for _, measured in found)
    return Point(
        best.layout,
        best.lacks,
        best.run.memory,
        best.seconds,
        shares(pipeline, best),
        1 - quickest / best.seconds,
    )


def measure(pipeline: Pipeline, layout: Layout, card: float) -> Measured:
    found = run(pipeline, layout.minibatches, Card(card, layout.together))
    lacks = ""
    if found.memory > profile_of(pipeline).device.usable:
        lacks = "memory"
    elif found.swapped > HOST_MEMORY / HOST:
        lacks = "host memory"
    return Measured(layout, found, with_reduction(pipeline, layout, found, card), lacks)


def shares(pipeline: Pipeline, measured: Measured) -> dict[str, float]:
    minibatches = measured.layout.minibatches
    unlinked = run(pipeline, minibatches, None)
    unswapped = run(pipeline, minibatches, None, swap=False)
    seconds = {
        "reduction": measured.seconds - measured.run.seconds,
        "link": measured.run.seconds - unlinked.seconds,
        "swap": unlinked.seconds - unswapped.seconds,
        "bubble": unswapped.seconds - unswapped.busiest,
        "compute": unswapped.busiest,
    }
    return {name: max(0.0, value) / measured.seconds for name, value in seconds.items()}


def with_reduction(pipeline: Pipeline, layout: Layout, found: Run, card: float) -> float:
    """Seconds of an update whose gradients are added up: inside each host, between hosts, and inside again.

    Inside, each GPU sends 2 (r - 1) / r of its gradients, where r hold the same stage. Between h hosts the card of each
    carries 2 (h - 1) / h of the gradients of each of its stages, stage by stage. It begins during the last backward,
    since gradients go in buckets (`reduction` of vpipe/simulate/network.py).
    """
    near, hosts = layout.together, layout.pipelines // layout.together
    ranks, sizes = stage_bytes(pipeline)
    inside = [(near - 1) / near * size / INSIDE.bandwidth for size in sizes]  # each way
    between = [2 * (hosts - 1) / hosts * size / card for size in sizes]
    latency = 2 * (ceil(log2(near)) * INSIDE.latency + ceil(log2(hosts)) * LATENCY)
    host_of = [rank // (HOST // near) for rank in ranks]

    def ends(ready: Sequence[float]) -> list[float]:
        """When the sums of each stage are there."""
        free: dict[int, float] = {}
        done = [0.0] * len(ready)
        for stage in sorted(range(len(ready)), key=lambda stage: ready[stage]):
            early = min(found.backward, between[stage] / near) * (1 - 1 / bucket_count(sizes[stage]))
            summed, host = ready[stage] + inside[stage], host_of[stage]
            free[host] = max(free.get(host, 0.0), summed - early) + between[stage]
            done[stage] = max(free[host], summed) + inside[stage] + latency
        return done

    if found.spans:
        done = ends([span.ready for span in found.spans])
        own = zip(found.spans, done, strict=True)
        return max(found.seconds, *(sums + span.update - span.begin for span, sums in own))
    # In a steady state each rank comes to its update a backward after the rank behind it.
    ready = [behind * found.backward for behind in reversed(range(len(sizes)))]
    waiting = max(sums - time for sums, time in zip(ends(ready), ready, strict=True))
    if not pipeline.each:
        return found.seconds + waiting
    carried = Counter[int]()
    for host, seconds in zip(host_of, between, strict=True):
        carried[host] += seconds
    return layout.minibatches * max(found.seconds / layout.minibatches + waiting, *carried.values(), 0.0)


@cache
def stage_bytes(pipeline: Pipeline) -> tuple[list[int], list[int]]:
    """The rank of each stage, and its gradients."""
    profile, plan = profile_of(pipeline), plan_of(pipeline)
    kind = kind_of(plan.schedule)
    schedule = kind.build(pipeline.stages, pipeline.stages if kind.synchronous else None)
    ends = list(accumulate(plan.partition))
    sizes = [
        profile.parameter_bytes(end - count, end) for end, count in zip(ends, plan.partition, strict=True)
    ]
    return [rank for (rank,) in schedule.placement], sizes
