"""What a run's ranks did with their time, in figures that people compare."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from vpipe.system.device_memory import peak_on_device

if TYPE_CHECKING:
    from vpipe.pipeline import Pipeline

TIMES = ("forward", "backward", "update", "send", "wait")
"""Those figures of a rank that make up its seconds."""


@dataclass(frozen=True)
class RankFigures:
    """One rank over some stretch of time: updates, seconds, bytes."""

    updates: float
    seconds: float
    forward: float
    backward: float
    update: float
    send: float
    wait: float
    bytes_sent: float
    bytes_received: float
    retries: float
    """Times that a GPU's allocator found no room, let the rank wait for its GPU, and gave back what it kept."""
    peak_memory: float

    @property
    def compute(self) -> float:
        return self.forward + self.backward + self.update

    @property
    def shares(self) -> dict[str, float]:
        """Of this rank's time: computing, sending (communication) and waiting (bubble)."""
        total = self.seconds or 1.0
        return {
            "compute_share": self.compute / total,
            "communication_share": self.send / total,
            "bubble_share": self.wait / total,
        }

    @property
    def numbers(self) -> list[float]:
        """All of it as plain numbers, which travel between ranks."""
        return list(astuple(self))

    def since(self, earlier: RankFigures) -> RankFigures:
        """What was done since then; the peak stays the whole run's."""
        differences = [now - then for now, then in zip(self.numbers, earlier.numbers, strict=True)]
        return replace(RankFigures(*differences), peak_memory=self.peak_memory)


def figures_of(pipe: Pipeline) -> RankFigures:
    """The figures of this rank since its start."""
    runtime = pipe.runtime
    ways = (runtime.forward_stats, runtime.backward_stats, runtime.update_stats)
    return RankFigures(
        updates=pipe.updates,
        seconds=perf_counter(),
        forward=runtime.forward_stats.compute,
        backward=runtime.backward_stats.compute,
        update=runtime.update_stats.compute,
        send=sum(way.send for way in ways),
        wait=runtime.waited,
        bytes_sent=runtime.handler.bytes_sent,
        bytes_received=runtime.handler.bytes_received,
        retries=allocator_retries(pipe.device),
        peak_memory=peak_memory(pipe.device),
    )


def peak_memory(device: torch.device) -> int:
    """The most that this rank has used: of its GPU's memory what the allocator took, else of the host's."""
    if device.type == "cuda":
        return peak_on_device(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def allocator_retries(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))
    return 0


class Meter:
    """The figures of this rank over the stretches of a run in which nothing but training happened."""

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe = pipe
        self._stretches: list[RankFigures] = []
        self._began: RankFigures | None = None

    def start(self) -> None:
        self._began = figures_of(self._pipe)

    def stop(self) -> None:
        if self._began is not None:
            self._stretches.append(figures_of(self._pipe).since(self._began))
            self._began = None

    @property
    def running(self) -> bool:
        return self._began is not None

    def total(self) -> RankFigures:
        running = [] if self._began is None else [figures_of(self._pipe).since(self._began)]
        now = figures_of(self._pipe)
        stretches = [now.since(now), *self._stretches, *running]
        sums = map(sum, zip(*(stretch.numbers for stretch in stretches), strict=True))
        return replace(RankFigures(*sums), peak_memory=now.peak_memory)


def shares(ranks: Sequence[RankFigures]) -> dict[str, float]:
    """Of all ranks' time: what was spent on computing (the share of the limit), sending and waiting.

    The limit is every rank computing its part with no communication and no waiting.
    """
    total = sum(rank.seconds for rank in ranks) or 1.0
    return {
        "of_limit": sum(rank.compute for rank in ranks) / total,
        "communication_share": sum(rank.send for rank in ranks) / total,
        "bubble_share": sum(rank.wait for rank in ranks) / total,
    }


def stage_figures(ranks: Sequence[RankFigures], placement: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """For each rank what it held and did, for the logs and the summary."""
    return [
        {
            "rank": rank,
            "stages": [stage for stage, holders in enumerate(placement) if rank in holders],
            "forward_s": figures.forward,
            "backward_s": figures.backward,
            "update_s": figures.update,
            "send_s": figures.send,
            "wait_s": figures.wait,
            "bytes_sent": int(figures.bytes_sent),
            "bytes_received": int(figures.bytes_received),
            "peak_memory": int(figures.peak_memory),
            "allocator_retries": int(figures.retries),
            **figures.shares,
        }
        for rank, figures in enumerate(ranks)
    ]
