"""Clocks of the bench: what work takes a rank's processor, or its GPU, which is asked only when all is done."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter, thread_time
from typing import TypeAlias

import torch

Mark: TypeAlias = "float | torch.cuda.Event"
Lap: TypeAlias = tuple[Mark, Mark]
"""The beginning and the end of some work."""


def clock_of(device: torch.device) -> Callable[[], Mark]:
    if device.type == "cuda":
        return _event
    # Its processor's time, which others on the machine do not lengthen; the wall's where work has more threads.
    return thread_time if torch.get_num_threads() == 1 else perf_counter


def seconds(lap: Lap) -> float:
    start, end = lap
    if isinstance(start, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        end.synchronize()
        return start.elapsed_time(end) / 1000
    assert isinstance(end, float)
    return end - start


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
