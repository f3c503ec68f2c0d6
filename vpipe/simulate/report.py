"""The output of `vpipe simulate`: plain data, and a table of it."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from vpipe.cost import Profile, taking_turns
from vpipe.simulate.memory import RankMemory
from vpipe.simulate.simulation import Simulation
from vpipe.system.units import duration, show_bytes

NOTABLE = 1.005
"""How many times as long an update must be to be worth a line."""


def describe(simulation: Simulation) -> dict[str, Any]:
    """The simulation as plain data; `steady` is null for synchronous schedules, which have no such part."""
    return {
        "schedule": simulation.schedule,
        "minibatches": simulation.minibatches,
        "batch_size": simulation.batch_size,
        "update_interval": simulation.update_interval,
        "step_time": simulation.step_time,
        "samples_per_s": simulation.samples_per_second,
        "bubble_share": simulation.bubble,
        "steady": None if simulation.synchronous else simulation.steady,
        "makespan": simulation.makespan,
        "in_flight": list(simulation.in_flight),
        "versions": list(simulation.versions),
        "ranks": [
            {
                "rank": rank.rank,
                "stages": list(rank.stages),
                "compute_share": rank.compute,
                "sending_share": rank.sending,
                "bubble_share": rank.bubble,
                "host_pace": rank.pace,
                "peak_memory": rank.memory.total,
                "memory": rank.memory._asdict(),
            }
            for rank in simulation.ranks
        ],
    }


def simulation_table(simulation: Simulation, profile: Profile) -> Table:
    table = Table(title=headline(simulation), title_justify="left", caption_justify="left")
    shares = ("rank", "stage", "compute", "sending", "bubble", "in flight", "live versions")
    for column in (*shares, "peak memory", *RankMemory._fields):
        table.add_column(column, justify="right")
    over = 0
    for rank in simulation.ranks:
        fits = rank.memory.total <= profile.device.usable
        over += not fits
        table.add_row(
            str(rank.rank),
            ", ".join(map(str, rank.stages)),
            f"{rank.compute:.1%}",
            f"{rank.sending:.1%}",
            f"{rank.bubble:.1%}",
            ", ".join(str(simulation.in_flight[stage]) for stage in rank.stages),
            ", ".join(str(simulation.versions[stage]) for stage in rank.stages),
            show_bytes(rank.memory.total) + ("" if fits else " !"),
            *(show_bytes(count) if count else "-" for count in rank.memory),
        )
    lines = []
    if simulation.synchronous and simulation.makespan > NOTABLE * simulation.step_time:
        lines.append(
            f"{duration(simulation.makespan)} an update where it waits for all ranks (`clip_norm`, "
            "`on_nonfinite: skip`, fp16)"
        )
    if over:
        ranks = "1 rank needs" if over == 1 else f"{over} ranks need"
        lines.append(f"! {ranks} more memory than the device's {show_bytes(profile.device.usable)}")
    if (slow := max(simulation.ranks, key=lambda rank: rank.pace)).pace > 1:
        lines.append(
            f"rank {slow.rank} is {slow.pace:.2f} times as slow as its device: its host launches kernels more slowly "
            "(larger minibatches or `cuda_graphs: auto` help)"
        )
    if (line := taking_turns(profile, len(simulation.ranks))) is not None:
        lines.append(line)
    table.caption = "\n".join(lines) or None
    return table


def headline(simulation: Simulation) -> str:
    count = f"{simulation.minibatches} minibatches of {simulation.batch_size}"
    figures = (
        f"{simulation.samples_per_second:.4g} samples/s, {duration(simulation.step_time)} an update, "
        f"bubble {simulation.bubble:.1%}"
    )
    if simulation.synchronous:
        return f"{simulation.schedule}, {count}: {figures}"
    how = "steady state" if simulation.steady else "too few for a steady state: filling and draining included"
    return f"{simulation.schedule}, {count} ({how}): {figures}"
