"""Too much communication: what share of the time goes to messages, how many bytes, whether fewer stages would do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vpipe.errors import VPipeError
from vpipe.observe.diagnosis.evidence import Evidence
from vpipe.observe.diagnosis.finding import FAULT, FINE, NOTICE, UNKNOWN, Finding
from vpipe.observe.medians import message_bytes, training
from vpipe.observe.prediction import RunCosts
from vpipe.schedule import Op
from vpipe.schedule.action import COMMUNICATION
from vpipe.simulate import simulate
from vpipe.system.units import show_bytes

TOPIC = "communication"
MUCH = 0.2
"""A share of the ranks' time from which on it is worth a look."""


def look(evidence: Evidence) -> Finding:
    if not any(events.actions for events in evidence.ranks):
        return Finding(TOPIC, UNKNOWN, "no action was recorded")
    spent = computed = 0.0
    for entry in training(evidence.ranks):
        busy = entry.duration - entry.wait
        if entry.action.op in COMMUNICATION:
            spent += busy
        else:
            computed += busy
    share = spent / (spent + computed) if spent + computed else 0.0
    sizes = message_bytes(evidence.ranks)
    forward = {stage: count for (stage, op), count in sizes.items() if op is Op.SEND_F}
    total = sum(sizes.values())
    figures: dict[str, Any] = {"share": share, "bytes_per_minibatch": total, "sent_forward": forward}
    text = f"{share:.1%} of the ranks' busy time goes to messages, {show_bytes(total)} a minibatch"
    if forward:
        widest = max(forward, key=forward.__getitem__)
        text += f"; the widest cut is behind stage {widest}, {show_bytes(forward[widest])}"
    if share < MUCH:
        return Finding(TOPIC, FINE, text, figures)
    text += _with_fewer(evidence.costs, figures)
    return Finding(TOPIC, FAULT if share > 2 * MUCH else NOTICE, text, figures)


def _with_fewer(costs: RunCosts | None, figures: dict[str, Any]) -> str:
    """The same with the two lightest neighbouring stages as one, by simulation."""
    if costs is None or len(costs.plan.partition) < 3 or costs.plan.replicas or costs.plan.chunks:
        return ""
    partition = list(costs.plan.partition)
    place = min(range(len(partition) - 1), key=lambda stage: partition[stage] + partition[stage + 1])
    partition[place : place + 2] = [partition[place] + partition[place + 1]]
    try:
        now = costs.simulate().samples_per_second
        fewer = simulate(costs.profile, replace(costs.plan, partition=tuple(partition))).samples_per_second
    except VPipeError:
        return ""
    figures |= {"fewer_stages": partition, "fewer_samples_per_s": fewer, "simulated_samples_per_s": now}
    return (
        f"; by simulation {len(partition)} stages ({partition}) would make {fewer:.1f} samples/s, "
        f"these {len(costs.plan.partition)} make {now:.1f}"
    )
