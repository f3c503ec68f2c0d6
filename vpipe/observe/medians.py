"""What the actions of a run took, without waiting: the median for each stage and operation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median

from vpipe.record.events import RankEvents, Recorded
from vpipe.schedule import Op

Medians = dict[tuple[int, Op], float]
"""Seconds, by stage and operation."""


def medians(ranks: Iterable[RankEvents]) -> Medians:
    """Over all of a stage's replicas; evaluations are left out."""
    found: dict[tuple[int, Op], list[float]] = defaultdict(list)
    for entry in training(ranks):
        found[entry.action.stage, entry.action.op].append(max(0.0, entry.duration - entry.wait))
    return {key: median(times) for key, times in found.items()}


def training(ranks: Iterable[RankEvents]) -> Iterable[Recorded]:
    return (entry for events in ranks for entry in events.actions if not entry.evaluation)


def compute_seconds(found: Medians, stage: int) -> float:
    """Forward and backward of one minibatch."""
    return sum(found.get((stage, op), 0.0) for op in (Op.F, Op.B, Op.I, Op.W))


def message_bytes(ranks: Sequence[RankEvents]) -> dict[tuple[int, Op], int]:
    """What a stage sends of one minibatch, by stage and operation."""
    found: dict[tuple[int, Op], list[int]] = defaultdict(list)
    for entry in training(ranks):
        if entry.action.op in (Op.SEND_F, Op.SEND_B):
            found[entry.action.stage, entry.action.op].append(entry.sent)
    return {key: round(median(counts)) for key, counts in found.items()}
