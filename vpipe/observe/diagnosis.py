"""`vpipe diagnose`: the guides' table of faults, checked for one run with figures from its own files."""

from __future__ import annotations

import math
import re
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

from rich.text import Text

from vpipe.errors import printable
from vpipe.observe.action_figures import check_versions, most
from vpipe.observe.bottlenecks import communication, throughput
from vpipe.observe.evidence import FAULT, FINE, NOTICE, UNKNOWN, Evidence, Finding, read_evidence
from vpipe.observe.hang import GONE, SUSPENDED, RankState, culprit, sentence
from vpipe.observe.overshoot import staleness
from vpipe.record import run_folder
from vpipe.record.run_folder import read_lines
from vpipe.record.status import ENDED, FAILED, RUNNING, STOPPED
from vpipe.system.console import PlainConsole
from vpipe.system.files import json_text, read_tail
from vpipe.system.units import show_bytes

STYLES = {FAULT: "bold red", NOTICE: "yellow", FINE: "green", UNKNOWN: "bright_black"}


def diagnose(folder: Path) -> list[Finding]:
    """Faults first, in the order of the guides' table within each grade."""
    evidence = read_evidence(folder)
    checks = (standstill, memory, loss, staleness, throughput, communication, versions)
    found = [check(evidence) for check in checks]
    return sorted(found, key=lambda finding: list(STYLES).index(finding.grade))


def diagnose_command(folder: Path, as_json: bool) -> None:
    found = diagnose(folder)
    if as_json:
        print(json_text([asdict(finding) for finding in found], ascii=True))
        return
    console = PlainConsole(soft_wrap=True)
    for finding in found:
        line = Text(f"{finding.grade:8}", style=STYLES[finding.grade])
        console.print(
            Text.assemble(line, (f"{finding.topic:14}", "bold"), printable(finding.text, lines=True))
        )


# Standstill: a hang or a dead rank

LONG = 10.0
"""Seconds of waiting that are reported while a run goes on."""


def standstill(evidence: Evidence) -> Finding:
    topic, states = "standstill", evidence.states
    failures = [line for line in read_lines(evidence.folder / "failures.jsonl", "how") if "rank" in line]
    if evidence.ended == run_folder.STOPPED or (
        states and all(each.status.state == STOPPED for each in states)
    ):
        return _stopped(evidence)
    if failures and evidence.ended != run_folder.COMPLETE:
        return _failure(failures[-1], states)
    if not states:
        return Finding(topic, UNKNOWN, "no rank has left a status: its training has not begun")
    if any(each.fate == GONE or each.status.state == FAILED for each in states):
        return _death(evidence)
    explained = read_tail(evidence.folder / "hang.txt").rstrip()
    if all(each.status.state == ENDED for each in states):
        text = f"all {len(states)} ranks came to their end"
        if not explained:
            return Finding(topic, FINE, text)
        return Finding(topic, NOTICE, f"{text}, but for a while: {explained}")
    longest = max((each.status.waiting.seconds for each in states if each.status.waiting), default=0.0)
    if longest > LONG or any(each.fate for each in states):
        first = culprit(states)
        figures = {"culprit": None if first is None else first.rank, "waiting_s": round(longest, 1)}
        grid = "\n" + explained.partition("\n")[2] if explained else ""
        return Finding(topic, FAULT, sentence(states) + grid, figures)
    running = sum(each.status.state == RUNNING for each in states)
    return Finding(topic, FINE, f"{running} of {len(states)} ranks run, the longest wait is {longest:.1f} s")


def _stopped(evidence: Evidence) -> Finding:
    updates = max((each.status.updates for each in evidence.states), default=0)
    total = max((each.status.total for each in evidence.states), default=0)
    text = f"the run was stopped by you after {updates} of {total} updates: that is no fault"
    if error := evidence.summary.get("error"):
        text += f"; {error}"
    return Finding("standstill", FINE, text, {"updates": updates, "total": total})


def _failure(failure: dict[str, Any], states: list[RankState]) -> Finding:
    """From the line of the launcher, which saw the process end."""
    rank = int(failure["rank"])
    text = f"rank {rank} failed: {failure['how']}" + "".join(_waited(each, rank) for each in states)
    updates = max((each.status.updates for each in states), default=0)
    figures = {"culprit": rank, "updates": updates}
    return Finding("standstill", FAULT, f"{text}; {updates} updates were made", figures)


def _death(evidence: Evidence) -> Finding:
    """The rank that failed by itself: a process that is gone, else one whose error does not name another rank."""
    states = evidence.states
    dead = [each for each in states if each.fate in (GONE, SUSPENDED)]
    failed = [each for each in states if each.status.state == FAILED]
    own = [each for each in failed if "rank" not in each.status.error.partition(":")[0]]
    first = (dead or own or failed)[0]
    text = f"rank {first.rank} (stage {', '.join(map(str, first.status.stages))})"
    if first in dead:
        text += f" died without a message, {first.where}, after {first.status.updates} updates"
        log = evidence.log(first.rank)
        if "Killed" in log or "out of memory" in log.lower():
            text += "; its log mentions memory"
    else:
        text += f" failed {first.where}: {first.status.error}"
    for each in states:
        waited = _waited(each, first.rank)
        if each.rank != first.rank and each.status.error and not waited:
            text += f"; rank {each.rank}: {each.status.error}"
        text += waited
    figures = {"culprit": first.rank, "place": first.status.place, "updates": first.status.updates}
    return Finding("standstill", FAULT, text, figures)


def _waited(each: RankState, culprit: int) -> str:
    """What a rank waited for when the culprit ended, if it waited for that one."""
    waiting = each.status.waiting
    if waiting is None or waiting.peer != culprit or each.rank == culprit:
        return ""
    if waiting.room:
        return f"; rank {each.rank} waited in {waiting.what} for it"
    return f"; rank {each.rank} waited for {waiting.what} from it"


# Memory

RAN_OUT = re.compile(r"out of memory|MemoryError|can't allocate memory|Cannot allocate memory", re.IGNORECASE)
TIGHT = 0.9
PARTS = ("weights", "gradients", "optimizer", "versions", "activations")


def memory(evidence: Evidence) -> Finding:
    """Whether the memory ran out, what uses most of it, and what would need less."""
    states = evidence.states
    ran_out = [each.rank for each in states if RAN_OUT.search(each.status.error + evidence.log(each.rank))]
    parts = _parts(evidence)
    if not parts:
        text = f"rank {ran_out[0]} ran out of memory" if ran_out else "nothing was counted"
        return Finding("memory", FAULT if ran_out else UNKNOWN, text, {"ran_out": ran_out})
    stage, part = max(parts.items(), key=lambda item: _total(item[1]))
    largest = max(PARTS, key=part.__getitem__)
    text = (
        f"stage {stage} holds the most, {show_bytes(_total(part))} by count: {show_bytes(part['activations'])} of "
        f"activations ({part['in_flight']} minibatches of {show_bytes(part['minibatch'])}), "
        f"{show_bytes(part['weights'] + part['gradients'])} of weights and gradients, "
        f"{show_bytes(part['optimizer'])} of optimizer state, {show_bytes(part['versions'])} of old weights"
    )
    cap = evidence.stages.cap if evidence.stages else None
    figures: dict[str, Any] = {"ran_out": ran_out, "largest": largest, "stages": parts, "cap": cap}
    grade = FINE
    retries = {rank["rank"]: rank.get("allocator_retries", 0) for rank in evidence.summary.get("ranks", [])}
    if ran_out:
        grade, text = FAULT, f"rank {ran_out[0]} ran out of memory; {text}; {_remedy(largest, part)}"
    elif any(retries.values()):
        rank, times = max(retries.items(), key=lambda item: item[1])
        figures["allocator_retries"] = {"rank": rank, "times": times}
        grade, text = (
            NOTICE,
            (
                f"rank {rank}'s GPU was nearly full: {times} times its allocator found no room, waited until the GPU "
                f"was idle and released memory; plan with less --memory, or a smaller batch_size; {text}"
            ),
        )
    elif cap is not None and _total(part) > TIGHT * cap:
        grade, text = NOTICE, f"{text}: {_total(part) / cap:.0%} of the {show_bytes(cap)} allowed"
    return Finding("memory", grade, text, figures)


def _parts(evidence: Evidence) -> dict[int, dict[str, int]]:
    """For each stage the bytes of each part, at its peak."""
    parts = {}
    for events in evidence.ranks:
        for stage, held in events.held.items():
            in_flight, versions = most(events.actions, stage)
            parts[stage] = {
                "rank": events.rank,
                "weights": held.weights,
                "gradients": held.weights,
                "optimizer": held.optimizer,
                "versions": max(0, versions - 1) * held.weights,
                "activations": in_flight * held.minibatch,
                "in_flight": in_flight,
                "minibatch": held.minibatch,
            }
    return parts


def _total(part: dict[str, int]) -> int:
    return sum(part[name] for name in PARTS)


def _remedy(largest: str, part: dict[str, int]) -> str:
    """How to make the largest part smaller."""
    if largest == "activations":
        half = show_bytes(part["activations"] / 2)
        return f"half the batch_size would save {half}, recompute_ratio 1 nearly all of them"
    if largest == "versions":
        old = show_bytes(part["versions"])
        return f"a synchronous schedule, or macrobatch (one old version), would save up to {old}"
    if largest == "optimizer":
        return f"sgd keeps no state: {show_bytes(part['optimizer'])} less"
    return "more stages would share out the weights"


# Loss

FEW = 5
"""With fewer losses the finding is UNKNOWN."""
FALLS = 0.02
"""The share by which a loss must fall between the first fifth and the last."""


def loss(evidence: Evidence) -> Finding:
    losses = _losses(evidence)
    if len(losses) < FEW:
        return Finding("loss", UNKNOWN, f"too few losses are written down: {len(losses)}")
    rates = [line.get("learning_rate") for line in evidence.metrics if line.get("kind") == "train"]
    rate = max((each for each in rates if each is not None), default=None)
    *_, stale = check_versions(evidence.ranks)
    figures: dict[str, Any] = {"staleness": stale, "largest_learning_rate": rate}
    conditions = _conditions(figures)
    bad = next((place for place, (_, value) in enumerate(losses) if not math.isfinite(value)), None)
    if bad is not None:
        before = f"; it was {losses[bad - 1][1]:.4g} before" if bad else ""
        text = f"the loss is {losses[bad][1]} from update {losses[bad][0]} on{before}{conditions}"
        return Finding("loss", FAULT, text, figures)
    fifth = max(1, len(losses) // 5)
    first, last = mean(value for _, value in losses[:fifth]), mean(value for _, value in losses[-fifth:])
    lowest_at, lowest = min(losses, key=lambda point: point[1])
    figures |= {"first": first, "last": last, "lowest": lowest, "lowest_at": lowest_at}
    if last > first * (1 + FALLS):
        text = f"the loss rises, from {first:.4g} to {last:.4g}; it was lowest, {lowest:.4g}, at update {lowest_at}"
        return Finding("loss", FAULT, text + conditions, figures)
    if last > first * (1 - FALLS):
        text = f"the loss does not fall: {first:.4g}, then {last:.4g}{conditions}"
        return Finding("loss", NOTICE, text, figures)
    return Finding("loss", FINE, f"the loss falls, from {first:.4g} to {last:.4g}", figures)


def _losses(evidence: Evidence) -> list[tuple[int, float]]:
    points = evidence.summary.get("losses") or [
        (line["update"], line["loss"])
        for line in evidence.metrics
        if line.get("kind") == "train" and "loss" in line
    ]
    return [(int(update), math.nan if value is None else float(value)) for update, value in points]


def _conditions(figures: dict[str, Any]) -> str:
    """Usual causes of a rising loss: large steps, and gradients of old weights."""
    parts = []
    if figures["largest_learning_rate"] is not None:
        parts.append(f"the learning rate went up to {figures['largest_learning_rate']:.3g}")
    worst = max(figures["staleness"].items(), key=lambda item: item[1], default=None)
    if worst is not None and worst[1]:
        parts.append(f"stage {worst[0]} updates with gradients of weights {worst[1]} updates old")
    elif worst is not None:
        parts.append("no stage's gradients are stale")
    return f"; {', '.join(parts)}" if parts else ""


# Weight versions


def versions(evidence: Evidence) -> Finding:
    """Whether each backward read the weights of its forward, and each update made the next version."""
    checked, wrong, stale = check_versions(evidence.ranks)
    if not checked:
        return Finding("versions", UNKNOWN, "no action was recorded")
    figures = {"checked": checked, "wrong": wrong[:20], "staleness": stale}
    if wrong:
        text = f"{len(wrong)} of {checked} actions read a wrong version: {wrong[0]}"
        return Finding("versions", FAULT, text, figures)
    oldest = ", ".join(f"stage {stage}: {age}" for stage, age in sorted(stale.items()))
    text = f"all {checked} backwards and updates had the right version; updates behind, {oldest}"
    return Finding("versions", FINE, text, figures)
