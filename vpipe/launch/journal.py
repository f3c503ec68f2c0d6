"""What befell a run: `failures.jsonl` in its folder, one line for each rank that failed."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from vpipe.launch.watch import Culprit


class Journal:
    """Times are seconds since 1970, so that they can be compared with those of other hosts' logs."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "failures.jsonl"
        self._failed: float | None = None

    def failed(self, attempt: int, culprit: Culprit, found: float) -> None:
        """A rank failed, and all others have ended since."""
        self._failed = found
        self._write(
            attempt=attempt, rank=culprit.rank, how=culprit.how, found=found, ended=round(time.time(), 3)
        )

    def trains_again(self, attempt: int) -> None:
        if self._failed is not None:
            seconds = time.time() - self._failed
            print(f"the run trains again, {seconds:.1f} s after the fault", file=sys.stderr, flush=True)
            self._write(attempt=attempt, recovered=round(time.time(), 3))

    def _write(self, **figures: object) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(figures) + "\n")
