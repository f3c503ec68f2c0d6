"""The description of a run for those who look at it: its stages and its plan, when it begins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vpipe.cost import Plan
from vpipe.record.run_folder import STAGES
from vpipe.schedule import KINDS
from vpipe.schedule.program import in_order
from vpipe.system.files import write_json
from vpipe.system.units import read_bytes

if TYPE_CHECKING:
    from vpipe.pipeline import Pipeline
    from vpipe.pipeline.layout import Layout


def plan_of(pipe: Pipeline, *, replicas: Sequence[int] | None, chunks: int | None, batch_size: int) -> Plan:
    """The run as a plan, which another run may name as its partition."""
    layout, schedule = pipe.layout, pipe.schedule
    placement = tuple(dict.fromkeys(schedule.placement))
    return Plan(
        layout.partition,
        layout.policies,
        schedule.name,
        tuple(replicas or ()),
        schedule.minibatches if schedule.synchronous else None,
        chunks,
        None if schedule.synchronous else schedule.update_interval,
        schedule.depth or (),
        batch_size,
        layout.graph.plan_fingerprint,
        placement=() if in_order(placement) or schedule.name not in KINDS else placement,
    )


def write_stages(layout: Layout, folder: Path, cap: str | None) -> None:
    schedule = layout.schedule
    owner = {block: stage.index for stage in layout.stage_graphs for block in stage.blocks}
    blocks = [
        {
            "name": block.name,
            "stage": owner[block.index],
            "flops": block.flops,
            "cut_bytes": block.cut_bytes,
            "parameters": block.num_parameters,
        }
        for block in layout.graph.blocks
    ]
    values = {
        "schedule": schedule.name,
        "synchronous": schedule.synchronous,
        "update_interval": schedule.update_interval,
        "placement": schedule.placement,
        "edges": sorted(schedule.edges or ()),
        "cap": None if cap is None else read_bytes(cap, "gpu_memory"),
        "blocks": blocks,
    }
    write_json(folder / STAGES, values)
