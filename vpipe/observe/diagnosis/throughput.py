"""Low throughput: which stage keeps the others waiting, whether it holds too much or its rank is slow, and what
partition would be better, by simulation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from vpipe.errors import VPipeError
from vpipe.observe.diagnosis.evidence import Evidence
from vpipe.observe.diagnosis.finding import FAULT, FINE, NOTICE, UNKNOWN, Finding
from vpipe.observe.medians import compute_seconds
from vpipe.observe.prediction import RunCosts
from vpipe.record.stages import StageFacts

TOPIC = "throughput"
SLOW = 2.5
"""Times as long for a floating-point operation as the quickest stage: then it is the rank, not the partition."""
GAIN = 1.05
"""A partition that is better by less is not worth a word."""
MOVES = 200
"""Partitions that are simulated at most."""


def look(evidence: Evidence) -> Finding:
    facts, costs = evidence.stages, evidence.costs
    if facts is None or not evidence.ranks:
        return Finding(TOPIC, UNKNOWN, "no action was recorded")
    seconds = [compute_seconds(evidence.medians, stage) for stage in range(len(facts.placement))]
    if not all(seconds):
        return Finding(TOPIC, UNKNOWN, "some stage has recorded no action")
    shares = [each / len(holders) for each, holders in zip(seconds, facts.placement, strict=True)]
    slowest = max(range(len(shares)), key=shares.__getitem__)
    figures: dict[str, Any] = {
        "stage_seconds": seconds,
        "slowest": slowest,
        "imbalance": max(shares) / min(shares),
    }
    told = ", ".join(f"stage {stage} {1000 * each:.1f} ms" for stage, each in enumerate(seconds))
    text = f"a minibatch takes {told}"
    paces = _paces(facts, seconds)
    figures["pace"] = paces
    # A light stage is slow for its work, since an action costs something by itself; it keeps nobody waiting.
    if paces[slowest] > SLOW:
        ranks = ", ".join(map(str, facts.placement[slowest]))
        figures["slow_ranks"] = list(facts.placement[slowest])
        text += (
            f": rank {ranks} is slow, stage {slowest} takes {paces[slowest]:.1f} times as long for a floating-point "
            "operation as the quickest stage"
        )
        return Finding(TOPIC, FAULT, text, figures)
    if costs is None:
        return Finding(TOPIC, NOTICE if figures["imbalance"] > SLOW else FINE, text, figures)
    return _partition(costs, text, figures, slowest)


def _partition(costs: RunCosts, text: str, figures: dict[str, Any], slowest: int) -> Finding:
    """Whether another partition would be quicker."""
    try:
        now = costs.simulate()
        better, reached = best_partition(costs)
    except VPipeError as error:
        return Finding(TOPIC, UNKNOWN, f"{text}; it cannot be simulated: {error}", figures)
    gain = reached / now.samples_per_second
    figures |= {
        "partition": list(costs.plan.partition),
        "simulated_samples_per_s": now.samples_per_second,
        "simulated_bubble": now.bubble,
        "better_partition": list(better),
        "better_samples_per_s": reached,
        "gain": gain,
        "costs": costs.source,
    }
    if gain < GAIN:
        text += (
            f": no other partition is quicker by {GAIN - 1:.0%}; by simulation (with {costs.source}) it makes "
            f"{now.samples_per_second:.1f} samples/s and ranks are idle {now.bubble:.0%} of the time"
        )
        return Finding(TOPIC, FINE, text, figures)
    text += (
        f": stage {slowest} keeps the others waiting; by simulation (with {costs.source}) the partition "
        f"{list(better)} makes {reached:.1f} samples/s, {list(costs.plan.partition)} makes "
        f"{now.samples_per_second:.1f}: {gain - 1:.0%} more"
    )
    return Finding(TOPIC, FAULT if gain > 1.2 else NOTICE, text, figures)


def best_partition(costs: RunCosts) -> tuple[tuple[int, ...], float]:
    """From the run's own partition, blocks are moved between neighbouring stages while the simulation gets quicker."""
    blocks = sum(costs.plan.partition)

    def speed(partition: Sequence[int]) -> float:
        plan = replace(costs.plan, partition=tuple(partition), policies=costs.plan.policies[:blocks])
        return costs.simulate(plan).samples_per_second

    best = tuple(costs.plan.partition)
    reached, tried = speed(best), {best}
    improved = True
    while improved and len(tried) < MOVES:
        improved = False
        for partition in _neighbours(best):
            if partition not in tried and len(tried) < MOVES:
                tried.add(partition)
                made = speed(partition)
                if made > reached * 1.0001:
                    best, reached, improved = partition, made, True
    return best, reached


def _neighbours(partition: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Partitions in which some neighbouring cuts lie a few blocks earlier or later."""
    for step in (8, 4, 2, 1):
        for first in range(len(partition) - 1):
            for last in range(first + 1, len(partition)):
                for sign in (step, -step):
                    moved = list(partition)
                    moved[first] += sign
                    moved[last] -= sign
                    if min(moved) >= 1:
                        yield tuple(moved)


def _paces(facts: StageFacts, seconds: Sequence[float]) -> list[float]:
    """For each stage the time of a floating-point operation, as a multiple of the quickest stage's."""
    work = [sum(block.flops for block in facts.of_stage(stage)) for stage in range(len(seconds))]
    if not all(work):
        return [1.0] * len(seconds)
    each = [took / done for took, done in zip(seconds, work, strict=True)]
    return [pace / min(each) for pace in each]
