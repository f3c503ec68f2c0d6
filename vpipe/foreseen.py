"""What a run's plan had foreseen of a rank's memory, and how to plan for what there is."""

from __future__ import annotations

from pathlib import Path

from vpipe.cost.plan_file import read_plan
from vpipe.errors import VPipeError
from vpipe.pipeline import Pipeline


def foreseen(folder: Path, pipe: Pipeline) -> str:
    """A sentence for whoever has run out of memory."""
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
