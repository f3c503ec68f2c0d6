"""What a run's plan had foreseen of a rank's memory, told when it does not suffice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vpipe.config import RunConfig
from vpipe.cost import Plan
from vpipe.cost.plan_file import read_plan
from vpipe.errors import OutOfMemoryError, VPipeError
from vpipe.pipeline import Pipeline
from vpipe.train.fitting import held_beside, what_would_fit


@contextmanager
def telling_memory(config: RunConfig, folder: Path, pipe: Pipeline, running: Plan) -> Iterator[None]:
    """If memory does not suffice, the error also tells what the run's plan had foreseen, and what would fit."""
    beside = held_beside(pipe)
    try:
        yield
    except OutOfMemoryError as error:
        fits = what_would_fit(error, config, pipe, running, folder.parent / "cache", beside)
        raise OutOfMemoryError(f"{error}; {_foreseen(folder, pipe)}; {fits}") from error


def _foreseen(folder: Path, pipe: Pipeline) -> str:
    try:
        peaks = read_plan(folder / "plan.json").prediction.get("peak_memory")
    except VPipeError:
        peaks = None
    positions = list(dict.fromkeys(tuple(ranks) for ranks in pipe.schedule.placement))
    position = next(number for number, ranks in enumerate(positions) if pipe.rank in ranks)
    if not isinstance(peaks, list) or len(peaks) != len(positions):
        return "no plan had foreseen what it needs"
    return f"the plan had foreseen {int(peaks[position]):,} bytes"
