"""What a run's plan had foreseen of a rank's memory, and how to plan for what there is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vpipe.cost.plan_file import read_plan
from vpipe.errors import OutOfMemoryError, VPipeError
from vpipe.pipeline import Pipeline


@contextmanager
def telling_memory(folder: Path, pipe: Pipeline) -> Iterator[None]:
    """If memory does not suffice, the error also tells what the run's plan had foreseen."""
    try:
        yield
    except OutOfMemoryError as error:
        raise OutOfMemoryError(f"{error}; {_foreseen(folder, pipe)}") from error


def _foreseen(folder: Path, pipe: Pipeline) -> str:
    advice = (
        "partition: auto with gpu_memory set to what there is chooses cuts and recomputation that fit, "
        "or says what is missing; recompute: true needs the least"
    )
    try:
        peaks = read_plan(folder / "plan.json").prediction.get("peak_memory")
    except VPipeError:
        peaks = None
    positions = list(dict.fromkeys(tuple(ranks) for ranks in pipe.schedule.placement))
    position = next(number for number, ranks in enumerate(positions) if pipe.rank in ranks)
    if not isinstance(peaks, list) or len(peaks) != len(positions):
        return f"no plan had foreseen what it needs: {advice}"
    return f"the plan had foreseen {int(peaks[position]):,} bytes: {advice}"
