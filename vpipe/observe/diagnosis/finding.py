"""A finding: what was looked at, what was seen, in figures, and whether it is a fault."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

FAULT, NOTICE, FINE, UNKNOWN = "fault", "notice", "fine", "unknown"


@dataclass(frozen=True)
class Finding:
    topic: str
    grade: str
    """FAULT: this is what is wrong. NOTICE: it could be better. FINE. UNKNOWN: the run left too little behind."""
    text: str
    figures: dict[str, Any] = field(default_factory=dict)
