"""Version errors: whether each backward read the weights that its forward saw, and each update made the next."""

from __future__ import annotations

from collections.abc import Sequence

from vpipe.observe.diagnosis.evidence import Evidence
from vpipe.observe.diagnosis.finding import FAULT, FINE, UNKNOWN, Finding
from vpipe.record.events import NO_VERSION, RankEvents
from vpipe.schedule import Op

TOPIC = "versions"


def look(evidence: Evidence) -> Finding:
    checked, wrong = _check(evidence.ranks)
    if not checked:
        return Finding(TOPIC, UNKNOWN, "no action was recorded")
    stale = staleness(evidence.ranks)
    figures = {"checked": checked, "wrong": wrong[:20], "staleness": stale}
    if wrong:
        return Finding(
            TOPIC, FAULT, f"{len(wrong)} of {checked} actions read a wrong version: {wrong[0]}", figures
        )
    oldest = ", ".join(f"stage {stage}: {age}" for stage, age in sorted(stale.items()))
    return Finding(
        TOPIC,
        FINE,
        f"all {checked} backwards and updates had the right version; updates behind, {oldest}",
        figures,
    )


def _check(ranks: Sequence[RankEvents]) -> tuple[int, list[str]]:
    checked, wrong = 0, []
    for events in ranks:
        read: dict[tuple[int, int], int] = {}
        made: dict[int, int] = {}
        for entry in events.actions:
            stage, op, minibatch = entry.action
            if entry.evaluation or entry.version == NO_VERSION:
                continue
            if op is Op.F:
                read[stage, minibatch] = entry.version
                checked += 1
                if entry.version != made.setdefault(stage, entry.version):
                    wrong.append(f"{entry.action} read version {entry.version}, the newest was {made[stage]}")
            elif op in (Op.B, Op.I) and (stage, minibatch) in read:
                checked += 1
                seen = read.pop((stage, minibatch))
                if entry.version != seen:
                    wrong.append(f"{entry.action} read version {entry.version}, its forward {seen}")
            elif op is Op.STEP:
                checked += 1
                # Two more than before is no fault: an overflow may have skipped one.
                if stage in made and entry.version < made[stage]:
                    wrong.append(f"{entry.action} made version {entry.version} after {made[stage]}")
                made[stage] = entry.version
    return checked, wrong


def staleness(ranks: Sequence[RankEvents]) -> dict[int, int]:
    """For each stage the most updates that were made between the weights a gradient is of and the update it makes."""
    found: dict[int, int] = {}
    for events in ranks:
        newest: dict[int, int] = {}
        for entry in events.actions:
            stage, op, _ = entry.action
            if entry.evaluation or entry.version == NO_VERSION:
                continue
            if op in (Op.F, Op.STEP):
                newest[stage] = max(entry.version, newest.get(stage, 0))
            if op in (Op.B, Op.I):
                found[stage] = max(found.get(stage, 0), newest.get(stage, entry.version) - entry.version)
    return found
