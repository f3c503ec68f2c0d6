"""Checks of a run's speed: the slowest stage and a better partition by simulation; the share of communication."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from vpipe.errors import VPipeError
from vpipe.observe.action_figures import medians, message_bytes, training
from vpipe.observe.evidence import FAULT, FINE, NOTICE, UNKNOWN, Evidence, Finding
from vpipe.observe.prediction import RunCosts
from vpipe.record.run_folder import StageFacts
from vpipe.schedule import Op
from vpipe.schedule.action import COMMUNICATION
from vpipe.simulate import simulate
from vpipe.system.units import show_bytes

THROUGHPUT, MESSAGES = "throughput", "communication"
SLOW = 2.5
"""Times as long for a floating-point operation as the quickest stage: then it is the rank, not the partition."""
GAIN = 1.05
"""A partition that is better by less is not mentioned."""
MOVES = 200
"""The most partitions that are simulated."""
MUCH = 0.2
"""A share of the ranks' busy time from which on communication is worth a notice."""


def throughput(evidence: Evidence) -> Finding:
    """Whether a stage keeps the others waiting: because its rank is slow, or because it has too much work."""
    facts, costs = evidence.stages, evidence.costs
    if facts is None or not evidence.ranks:
        return Finding(THROUGHPUT, UNKNOWN, "no action was recorded")
    stages = range(len(facts.placement))
    found = medians(evidence.ranks)
    seconds = [sum(found.get((stage, op), 0.0) for op in (Op.F, Op.B, Op.I, Op.W)) for stage in stages]
    if not all(seconds):
        return Finding(THROUGHPUT, UNKNOWN, "some stage has recorded no action")
    shares = [each / len(holders) for each, holders in zip(seconds, facts.placement, strict=True)]
    slowest = max(stages, key=shares.__getitem__)
    paces = _paces(facts, seconds)
    figures: dict[str, Any] = {
        "stage_seconds": seconds,
        "slowest": slowest,
        "imbalance": max(shares) / min(shares),
        "pace": paces,
    }
    each = ", ".join(f"stage {stage} {1000 * took:.1f} ms" for stage, took in enumerate(seconds))
    text = f"a minibatch takes {each}"
    # A light stage is slow for its work, since an action costs something by itself; no rank waits for it.
    if paces[slowest] > SLOW:
        figures["slow_ranks"] = list(facts.placement[slowest])
        text += (
            f": rank {', '.join(map(str, facts.placement[slowest]))} is slow, stage {slowest} takes "
            f"{paces[slowest]:.1f} times as long for a floating-point operation as the quickest stage"
        )
        return Finding(THROUGHPUT, FAULT, text, figures)
    if costs is None:
        return Finding(THROUGHPUT, NOTICE if figures["imbalance"] > SLOW else FINE, text, figures)
    return _partition(costs, text, figures, slowest)


def _paces(facts: StageFacts, seconds: Sequence[float]) -> list[float]:
    """For each stage the time of a floating-point operation, as a multiple of the quickest stage's."""
    work = [sum(block.flops for block in facts.of_stage(stage)) for stage in range(len(seconds))]
    if not all(work):
        return [1.0] * len(seconds)
    each = [took / done for took, done in zip(seconds, work, strict=True)]
    return [pace / min(each) for pace in each]


def _partition(costs: RunCosts, text: str, figures: dict[str, Any], slowest: int) -> Finding:
    """Whether another partition would be quicker."""
    try:
        now = costs.simulate()
        better, reached = best_partition(costs)
    except VPipeError as error:
        return Finding(THROUGHPUT, UNKNOWN, f"{text}; it cannot be simulated: {error}", figures)
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
        return Finding(THROUGHPUT, FINE, text, figures)
    text += (
        f": stage {slowest} keeps the others waiting; by simulation (with {costs.source}) the partition "
        f"{list(better)} makes {reached:.1f} samples/s, {list(costs.plan.partition)} makes "
        f"{now.samples_per_second:.1f}: {gain - 1:.0%} more"
    )
    return Finding(THROUGHPUT, FAULT if gain > 1.2 else NOTICE, text, figures)


def best_partition(costs: RunCosts) -> tuple[tuple[int, ...], float]:
    """Move blocks between stages of the run's own partition as long as the simulation gets quicker."""
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


def communication(evidence: Evidence) -> Finding:
    """The share of busy time that goes to messages, their bytes, and whether fewer stages would be quicker."""
    if not any(events.actions for events in evidence.ranks):
        return Finding(MESSAGES, UNKNOWN, "no action was recorded")
    spent = busy = 0.0
    for entry in training(evidence.ranks):
        busy += entry.duration - entry.wait
        if entry.action.op in COMMUNICATION:
            spent += entry.duration - entry.wait
    share = spent / busy if busy else 0.0
    sizes = message_bytes(evidence.ranks)
    forward = {stage: count for (stage, op), count in sizes.items() if op is Op.SEND_F}
    total = sum(sizes.values())
    figures: dict[str, Any] = {"share": share, "bytes_per_minibatch": total, "sent_forward": forward}
    text = f"{share:.1%} of the ranks' busy time goes to messages, {show_bytes(total)} a minibatch"
    if forward:
        widest = max(forward, key=forward.__getitem__)
        text += f"; the widest cut is behind stage {widest}, {show_bytes(forward[widest])}"
    if share < MUCH:
        return Finding(MESSAGES, FINE, text, figures)
    text += _with_fewer(evidence.costs, figures)
    return Finding(MESSAGES, FAULT if share > 2 * MUCH else NOTICE, text, figures)


def _with_fewer(costs: RunCosts | None, figures: dict[str, Any]) -> str:
    """The simulated speed with the two lightest neighbouring stages as one."""
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
