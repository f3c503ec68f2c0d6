"""What was measured on a GPU, and what the simulator makes of the profile of that run: `-s` shows the table."""

import json
from pathlib import Path
from typing import Any

import pytest

from vpipe.cost import KEEP, Plan, Profile, read_profile
from vpipe.simulate import simulate

MEASURED = Path(__file__).parents[2] / "docs" / "measured"
LIMIT = 0.05


@pytest.fixture(scope="module")
def profiles() -> dict[bool, Profile]:
    """Of plain blocks, and of compiled ones."""
    names = {False: "gpu_schedules_profile.json", True: "gpu_compiled_profile.json"}
    return {compiled: read_profile(MEASURED / name) for compiled, name in names.items()}


def rows() -> list[dict[str, Any]]:
    lines = (MEASURED / "gpu_schedules.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if "schedule" in row]


def plan_of(row: dict[str, Any]) -> Plan:
    each = row["minibatches"]
    interval, per_update = (each, None) if row["schedule"] == "2bw" else (None, each)
    return Plan(
        partition=tuple(row["partition"]),
        policies=(KEEP,) * sum(row["partition"]),
        schedule=row["schedule"],
        minibatches=per_update,
        chunks=2 if row["schedule"] == "interleaved" else None,
        update_interval=interval,
        batch_size=row["batch"],
    )


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row['case']} {row['minibatches'] or ''}".strip())
def test_four_ranks_on_one_gpu(profiles: dict[bool, Profile], row: dict[str, Any]) -> None:
    plan = plan_of(row)
    result = simulate(profiles[row["compile"]], plan, None, plan.minibatches or 64)
    speed = result.samples_per_second / row["samples_per_s"] - 1
    totals = [rank.memory.total for rank in result.ranks]
    memory = [foreseen / peak - 1 for foreseen, peak in zip(totals, row["peak_bytes"], strict=True)]
    shown = " ".join(f"{off:+.1%}" for off in memory)
    print(
        f"\n{row['samples_per_s']:.0f} samples/s, foreseen {result.samples_per_second:.0f} ({speed:+.1%}); {shown}"
    )
    assert abs(speed) <= LIMIT
    assert all(abs(off) <= LIMIT for off in memory)
