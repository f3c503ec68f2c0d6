"""Loss not falling: where it stood and stands, with the learning rate and the staleness that it had there."""

from __future__ import annotations

import math
from statistics import mean
from typing import Any

from vpipe.observe.diagnosis.evidence import Evidence
from vpipe.observe.diagnosis.finding import FAULT, FINE, NOTICE, UNKNOWN, Finding
from vpipe.observe.diagnosis.versions import staleness

TOPIC = "loss"
FEW = 5
"""Lines of losses with which nothing can be said."""
FALLS = 0.02
"""A share of the loss by which it has to fall between the first fifth and the last."""


def look(evidence: Evidence) -> Finding:
    losses = _losses(evidence)
    if len(losses) < FEW:
        return Finding(TOPIC, UNKNOWN, f"too few losses are written down: {len(losses)}")
    rates = {
        line["update"]: line["learning_rate"]
        for line in evidence.metrics
        if line.get("kind") == "train" and line.get("learning_rate") is not None
    }
    stale = staleness(evidence.ranks)
    figures: dict[str, Any] = {"staleness": stale, "largest_learning_rate": max(rates.values(), default=None)}
    conditions = _conditions(figures)
    bad = next(((update, loss) for update, loss in losses if not math.isfinite(loss)), None)
    if bad is not None:
        before = [loss for update, loss in losses if update < bad[0]]
        was = f"; it was {before[-1]:.4g} before" if before else ""
        return Finding(
            TOPIC, FAULT, f"the loss is {bad[1]} from update {bad[0]} on{was}{conditions}", figures
        )
    fifth = max(1, len(losses) // 5)
    first, last = mean(loss for _, loss in losses[:fifth]), mean(loss for _, loss in losses[-fifth:])
    lowest_at, lowest = min(losses, key=lambda point: point[1])
    figures |= {"first": first, "last": last, "lowest": lowest, "lowest_at": lowest_at}
    if last > first * (1 + FALLS):
        text = f"the loss rises, from {first:.4g} to {last:.4g}; it was lowest, {lowest:.4g}, at update {lowest_at}"
        return Finding(TOPIC, FAULT, text + conditions, figures)
    if last > first * (1 - FALLS):
        return Finding(
            TOPIC, NOTICE, f"the loss does not fall: {first:.4g}, then {last:.4g}{conditions}", figures
        )
    return Finding(TOPIC, FINE, f"the loss falls, from {first:.4g} to {last:.4g}", figures)


def _losses(evidence: Evidence) -> list[tuple[int, float]]:
    told = evidence.summary.get("losses")
    if told:
        return [(int(update), _number(loss)) for update, loss in told]
    return [
        (line["update"], _number(line["loss"]))
        for line in evidence.metrics
        if line.get("kind") == "train" and "loss" in line
    ]


def _number(loss: Any) -> float:
    return math.nan if loss is None else float(loss)


def _conditions(figures: dict[str, Any]) -> str:
    """What makes a loss rise: large steps, and steps by gradients of old weights."""
    parts = []
    if figures["largest_learning_rate"] is not None:
        parts.append(f"the learning rate went up to {figures['largest_learning_rate']:.3g}")
    worst = max(figures["staleness"].items(), key=lambda item: item[1], default=None)
    if worst is not None and worst[1]:
        parts.append(f"stage {worst[0]} updates with gradients of weights {worst[1]} updates old")
    elif worst is not None:
        parts.append("no stage's gradients are stale")
    return f"; {', '.join(parts)}" if parts else ""
