"""The figures of a run as they are made: `metrics.jsonl`, and TensorBoard's scalars where it is installed."""

from __future__ import annotations

import json
from collections.abc import Iterator
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
            for name, value in scalars(kind, figures):
                self._board.add_scalar(name, value, update)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def scalars(kind: str, figures: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers under TensorBoard's names: `train/loss`; those of each rank as `rank 1, stage 1/bubble_share`."""
    for name, value in figures.items():
        if isinstance(value, int | float):
            yield f"{kind}/{name}", value
    for rank in figures.get("ranks", ()):
        place = f"rank {rank['rank']}, stage {', '.join(map(str, rank['stages']))}"
        yield from (
            (f"{place}/{k}", v) for k, v in rank.items() if k != "rank" and isinstance(v, int | float)
        )


def _board(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder))
