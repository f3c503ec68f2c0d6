"""The memory side of a report: for each rank what it held over time, by count and as a process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vpipe.observe.counted import always_bytes, counted_memory
from vpipe.record.events import RankEvents

POINTS = 1500
"""Of a line; of a longer one the highest of each stretch are kept."""


def memory_lines(ranks: Sequence[RankEvents]) -> list[dict[str, Any]]:
    """Seconds from the first action, and bytes."""
    began = min((events.actions[0].start for events in ranks if events.actions), default=0.0)
    return [
        {
            "rank": events.rank,
            "stages": sorted(events.held),
            "counted": _line(counted_memory(events), began),
            "process": _line((sample for sample in events.memory if sample[0] >= began), began),
            "of": events.memory_of,
            "fixed": always_bytes(events),
        }
        for events in ranks
        if events.held or events.memory
    ]


def _line(samples: Iterable[tuple[float, int]], began: float) -> list[list[float]]:
    points = [[round(time - began, 6), count] for time, count in samples]
    step = -(-len(points) // POINTS)
    if step < 2:
        return points
    return [max(points[at : at + step], key=lambda point: point[1]) for at in range(0, len(points), step)]
