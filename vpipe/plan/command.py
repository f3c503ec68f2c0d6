"""What `vpipe plan` does."""

from __future__ import annotations

import json
from pathlib import Path

from vpipe.cost import read_any_profile, write_plan
from vpipe.errors import VPipeError
from vpipe.plan.planner import AUTO, plan
from vpipe.plan.report import describe, plan_table
from vpipe.plan.result import PlanResult
from vpipe.sizes import read_bytes


def plan_command(
    profile: Path,
    stages: int,
    memory: str | None = None,
    schedule: str = "vpipe",
    minibatches: int | None = None,
    batch_size: str | None = None,
    chunks: int | None = None,
    as_json: bool = False,
    output: Path | None = None,
) -> None:
    """Tell the best plan for so many ranks.

    `memory` is a size such as 11GiB (default: the profiled device's), `batch_size` a number or 'auto'.
    """
    result = plan(
        read_any_profile(profile),
        stages,
        None if memory is None else read_bytes(memory),
        schedule,
        minibatches,
        None if batch_size is None else read_batch_size(batch_size),
        chunks,
    )
    tell_plan(result, as_json, output)


def tell_plan(result: PlanResult, as_json: bool, output: Path | None) -> None:
    """Print the plan; write it to `output`, if given."""
    from vpipe.tables import show

    if output is not None:
        write_plan(result.to_plan(), output)
    if as_json:
        print(json.dumps(describe(result)))
        return
    show(plan_table(result))
    if output is not None:
        print(f"plan {output}")


def read_batch_size(text: str) -> int | str:
    if text == AUTO:
        return AUTO
    if not text.isdecimal():
        raise VPipeError(f"batch size {text!r} is neither a whole number nor {AUTO!r}")
    return int(text)
