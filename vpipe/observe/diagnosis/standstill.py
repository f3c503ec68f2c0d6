"""Does it hang, or has a rank died? From what the ranks last said and what became of their processes."""

from __future__ import annotations

from typing import Any

from vpipe.observe.diagnosis.evidence import Evidence
from vpipe.observe.diagnosis.finding import FAULT, FINE, NOTICE, UNKNOWN, Finding
from vpipe.observe.hang import GONE, STOPPED, RankState, culprit, sentence
from vpipe.record.run_files import read_lines
from vpipe.record.status import ENDED, FAILED, RUNNING

TOPIC = "standstill"
LONG = 10.0
"""Seconds of waiting that are worth a word while a run goes on."""


def look(evidence: Evidence) -> Finding:
    states = evidence.states
    befell = [line for line in read_lines(evidence.folder / "failures.jsonl", "how") if "rank" in line]
    if befell and not evidence.summary:
        return _told(befell[-1], states)
    if not states:
        return Finding(TOPIC, UNKNOWN, "no rank has left a status: its training has not begun")
    dead = [each for each in states if each.fate == GONE]
    failed = [each for each in states if each.status.state == FAILED]
    if dead or failed:
        return _death(evidence)
    told = evidence.folder / "hang.txt"
    if all(each.status.state == ENDED for each in states):
        text = f"all {len(states)} ranks came to their end"
        if not told.is_file():
            return Finding(TOPIC, FINE, text)
        return Finding(TOPIC, NOTICE, f"{text}, but for a while: {told.read_text(encoding='utf-8').rstrip()}")
    longest = max((each.status.waiting.seconds for each in states if each.status.waiting), default=0.0)
    stuck = [each for each in states if each.fate]
    if stuck or longest > LONG:
        who = culprit(states)
        figures = {"culprit": None if who is None else who.rank, "waiting_s": round(longest, 1)}
        text = sentence(states)
        if told.is_file():
            text += "\n" + told.read_text(encoding="utf-8").partition("\n")[2].rstrip()
        return Finding(TOPIC, FAULT, text, figures)
    running = sum(each.status.state == RUNNING for each in states)
    return Finding(TOPIC, FINE, f"{running} of {len(states)} ranks run, the longest wait is {longest:.1f} s")


def _told(failure: dict[str, Any], states: list[RankState]) -> Finding:
    """What the launcher, which saw the process end, wrote down."""
    rank = int(failure["rank"])
    text = f"rank {rank} failed: {failure['how']}" + "".join(_waited(each, rank) for each in states)
    updates = max((each.status.updates for each in states), default=0)
    return Finding(
        TOPIC, FAULT, f"{text}; {updates} updates were made", {"culprit": rank, "updates": updates}
    )


def _death(evidence: Evidence) -> Finding:
    """The rank whose end was its own: a process that is gone, else one whose error does not speak of another rank."""
    states = evidence.states
    dead = [each for each in states if each.fate in (GONE, STOPPED)]
    failed = [each for each in states if each.status.state == FAILED]
    own = [each for each in failed if "rank" not in each.status.error.partition(":")[0]]
    first = (dead or own or failed)[0]
    where = f"in {first.place}" if first.inside else f"behind {first.place}"
    stage = ", ".join(map(str, first.status.stages))
    if first in dead:
        text = f"rank {first.rank} (stage {stage}) died without a word, {where}, after {first.status.updates} updates"
        if "Killed" in evidence.log(first.rank) or "out of memory" in evidence.log(first.rank).lower():
            text += "; its log speaks of memory"
    else:
        text = f"rank {first.rank} (stage {stage}) failed {where}: {first.status.error}"
    for each in states:
        if each.rank != first.rank and each.status.error and not _waited(each, first.rank):
            text += f"; rank {each.rank}: {each.status.error}"
        text += _waited(each, first.rank)
    return Finding(
        TOPIC, FAULT, text, {"culprit": first.rank, "place": first.place, "updates": first.status.updates}
    )


def _waited(each: RankState, culprit: int) -> str:
    """What a rank waited for when the culprit ended, if it waited for that one."""
    waiting = each.status.waiting
    if waiting is None or waiting.peer != culprit or each.rank == culprit:
        return ""
    if waiting.room:
        return f"; rank {each.rank} waited in {waiting.what} for it"
    return f"; rank {each.rank} waited for {waiting.what} from it"
