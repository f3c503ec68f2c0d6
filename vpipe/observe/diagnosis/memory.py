"""Out of memory: whether it ran out, what the memory went to, and what would make it less."""

from __future__ import annotations

import re
from typing import Any

from vpipe.observe.counts import most
from vpipe.observe.diagnosis.evidence import Evidence
from vpipe.observe.diagnosis.finding import FAULT, FINE, NOTICE, UNKNOWN, Finding
from vpipe.system.units import show_bytes

TOPIC = "memory"
RAN_OUT = re.compile(r"out of memory|MemoryError|can't allocate memory|Cannot allocate memory", re.IGNORECASE)
TIGHT = 0.9


def look(evidence: Evidence) -> Finding:
    ran_out = [
        each.rank for each in evidence.states if RAN_OUT.search(each.status.error + evidence.log(each.rank))
    ]
    parts = {}
    for events in evidence.ranks:
        for stage, counts in events.held.items():
            in_flight, versions = most(events.actions, stage)
            parts[stage] = {
                "rank": events.rank,
                "weights": counts.weights,
                "gradients": counts.weights,
                "optimizer": counts.optimizer,
                "versions": max(0, versions - 1) * counts.weights,
                "activations": in_flight * counts.minibatch,
                "in_flight": in_flight,
                "minibatch": counts.minibatch,
            }
    if not parts:
        text = f"rank {ran_out[0]} ran out of memory" if ran_out else "nothing was counted"
        return Finding(TOPIC, FAULT if ran_out else UNKNOWN, text, {"ran_out": ran_out})
    stage, part = max(parts.items(), key=lambda item: _total(item[1]))
    largest = max(PARTS, key=lambda name: part[name])
    text = (
        f"stage {stage} holds the most, {show_bytes(_total(part))} by count: {show_bytes(part['activations'])} of "
        f"activations ({part['in_flight']} minibatches of {show_bytes(part['minibatch'])}), "
        f"{show_bytes(part['weights'] + part['gradients'])} of weights and gradients, "
        f"{show_bytes(part['optimizer'])} of optimizer state, {show_bytes(part['versions'])} of old weights"
    )
    cap = evidence.stages.cap if evidence.stages else None
    figures: dict[str, Any] = {"ran_out": ran_out, "largest": largest, "stages": parts, "cap": cap}
    if ran_out:
        return Finding(
            TOPIC, FAULT, f"rank {ran_out[0]} ran out of memory; {text}{_remedy(largest, part)}", figures
        )
    if retried := _most_retries(evidence):
        figures["allocator_retries"] = retried
        return Finding(TOPIC, NOTICE, f"{_told(retried)}; {text}", figures)
    if cap is not None and _total(part) > TIGHT * cap:
        return Finding(
            TOPIC, NOTICE, f"{text}: {_total(part) / cap:.0%} of the {show_bytes(cap)} allowed", figures
        )
    return Finding(TOPIC, FINE, text, figures)


def _most_retries(evidence: Evidence) -> dict[str, int] | None:
    """The rank whose allocator found no room most often; None if none did."""
    ranks = [rank for rank in evidence.summary.get("ranks", []) if rank.get("allocator_retries")]
    if not ranks:
        return None
    most_of_all = max(ranks, key=lambda rank: rank["allocator_retries"])
    return {"rank": most_of_all["rank"], "times": most_of_all["allocator_retries"]}


def _told(retried: dict[str, int]) -> str:
    return (
        f"rank {retried['rank']}'s GPU was all but full: {retried['times']} times its allocator found no room, waited "
        "until the GPU had nothing to do and gave memory back; plan with less --memory, or a smaller batch_size"
    )


PARTS = ("weights", "gradients", "optimizer", "versions", "activations")


def _total(part: dict[str, int]) -> int:
    return sum(part[name] for name in PARTS)


def _remedy(largest: str, part: dict[str, int]) -> str:
    """What the largest part would be with what makes it less."""
    if largest == "activations":
        half = show_bytes(part["activations"] / 2)
        return f"; half the batch_size would save {half}, recompute_ratio 1 nearly all of them"
    if largest == "versions":
        old = show_bytes(part["versions"])
        return f"; a synchronous schedule, or macrobatch (one old version), would save up to {old}"
    if largest == "optimizer":
        return f"; sgd keeps no state: {show_bytes(part['optimizer'])} less"
    return "; more stages would share out the weights"
