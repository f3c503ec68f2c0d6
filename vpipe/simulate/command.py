"""What `vpipe simulate` does."""

from __future__ import annotations

import json
from pathlib import Path

from vpipe.cost import read_any_profile, read_plan
from vpipe.schedule.builders import at_least_one
from vpipe.simulate.report import describe, simulation_table
from vpipe.simulate.simulation import simulate
from vpipe.simulate.trace import write_trace


def simulate_command(
    profile: Path,
    plan: Path,
    schedule: str | None = None,
    minibatches: int | None = None,
    as_json: bool = False,
    trace: Path | None = None,
) -> None:
    """Print what the plan would take with this profile; write its timeline to `trace`, if given."""
    from vpipe.tables import show

    costs = read_any_profile(profile)
    if minibatches is not None:
        at_least_one("minibatches", minibatches)
    result = simulate(costs, read_plan(plan), schedule, minibatches, timeline=trace is not None)
    if trace is not None:
        write_trace(result, trace)
    if as_json:
        print(json.dumps(describe(result)))
    else:
        show(simulation_table(result, costs))
