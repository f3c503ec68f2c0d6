"""`vpipe diagnose`: the guides' table of what goes wrong, gone through for one run, with figures from its own files."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.text import Text

from vpipe.observe.diagnosis import communication, loss, memory, standstill, throughput, versions
from vpipe.observe.diagnosis.evidence import read_evidence
from vpipe.observe.diagnosis.finding import FAULT, FINE, NOTICE, UNKNOWN, Finding

__all__ = ["Finding", "diagnose", "diagnose_command"]

STYLES = {FAULT: "bold red", NOTICE: "yellow", FINE: "green", UNKNOWN: "bright_black"}


def diagnose(folder: Path) -> list[Finding]:
    """What is wrong first, in the order of the guides' table within that."""
    evidence = read_evidence(folder)
    rooms = (standstill, memory, loss, throughput, communication, versions)
    found = [room.look(evidence) for room in rooms]
    return sorted(found, key=lambda finding: list(STYLES).index(finding.grade))


def diagnose_command(folder: Path, as_json: bool) -> None:
    found = diagnose(folder)
    if as_json:
        print(json.dumps([asdict(finding) for finding in found]))
        return
    console = Console(highlight=False, soft_wrap=True)
    for finding in found:
        line = Text()
        line.append(f"{finding.grade:8}", style=STYLES[finding.grade])
        line.append(f"{finding.topic:14}", style="bold")
        line.append(finding.text)
        console.print(line)
