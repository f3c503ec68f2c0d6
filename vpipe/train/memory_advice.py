"""Out-of-memory errors of a run with the plan's prediction, and the command that plans for the memory there was."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vpipe.config import RunConfig
from vpipe.cost import read_plan
from vpipe.errors import OutOfMemoryError, VPipeError
from vpipe.observe.held_bytes import optimizer_of, weights_of
from vpipe.pipeline import Pipeline
from vpipe.system.device_memory import used_memory
from vpipe.system.units import read_bytes


@contextmanager
def memory_advice(config: RunConfig, folder: Path, pipe: Pipeline) -> Iterator[None]:
    """An OutOfMemoryError from inside also says what was predicted, and what to do."""
    tensors = sum(weights_of(stage) + optimizer_of(stage) for stage in pipe.runtime.stages.values())
    other = max(0, used_memory(pipe.device) - tensors)  # interpreter, libraries, data
    try:
        yield
    except OutOfMemoryError as error:
        advice = advise(config, memory_for_tensors(error, config, other))
        raise OutOfMemoryError(f"{error}; {_predicted(folder, pipe)}; {advice}") from error


def memory_for_tensors(error: OutOfMemoryError, config: RunConfig, other: int) -> int | None:
    """Bytes that the tensors of this rank could have, at most what the configuration allows; None: not known."""
    if error.held is None or error.free is None:
        return None
    free = error.free // int(
        os.environ.get("LOCAL_WORLD_SIZE", "1")
    )  # shared with the other ranks of the host
    if error.wanted is not None and error.wanted <= free:
        free = 0  # fragmented, or something else forbids it
    memory = max(1, error.held - other + free)
    return memory if config.gpu_memory is None else min(memory, read_bytes(config.gpu_memory))


def advise(config: RunConfig, memory: int | None) -> str:
    had = "" if memory is None else f"it had about {memory:,} bytes for tensors: "
    return (
        f"{had}`vpipe plan {config.source} --memory {memory or 'BYTES'} -o fits.json` (and the --set of this run) "
        "chooses cuts and recomputation that fit, or says what is missing; then train with "
        "`--set partition=fits.json`"
    )


def _predicted(folder: Path, pipe: Pipeline) -> str:
    try:
        peaks = read_plan(folder / "plan.json").prediction.get("peak_memory")
    except VPipeError:
        peaks = None
    positions = list(dict.fromkeys(tuple(ranks) for ranks in pipe.schedule.placement))
    position = next(number for number, ranks in enumerate(positions) if pipe.rank in ranks)
    if not isinstance(peaks, list) or len(peaks) != len(positions):
        return "no plan had predicted its memory"
    return f"the plan had predicted {int(peaks[position]):,} bytes"
