"""The figures of a run as they are made: `metrics.jsonl`, and TensorBoard's scalars where it is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class MetricsWriter:
    """One line of JSON for each report: what kind it is, the update, and its figures."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / "metrics.jsonl").open("a", encoding="utf-8", buffering=1)
        self._board = _board(folder / "tensorboard")

    def write(self, kind: str, update: int, **figures: Any) -> None:
        self._file.write(json.dumps({"kind": kind, "update": update, **figures}) + "\n")
        if self._board is not None:
            for name, value in figures.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(f"{kind}/{name}", value, update)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def _board(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder))
