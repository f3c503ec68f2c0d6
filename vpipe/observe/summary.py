"""The end of a run in one table."""

from __future__ import annotations

import os
from typing import Any

from rich.table import Table

from vpipe.system.units import show_bytes


def summary_table(summary: dict[str, Any]) -> Table:
    table = Table(title=f"{summary['schedule']}, {len(summary['ranks'])} ranks", show_header=False)
    table.add_column("figure", style="bold", no_wrap=True)
    table.add_column("value", overflow="fold")
    first = f", {summary['losses'][0][1]:.4f} at first" if summary["losses"] else ""
    table.add_row("loss", f"{summary['loss']:.4f} after {summary['updates']} updates{first}")
    table.add_row(
        "evaluation", f"loss {summary['evaluation_loss']:.4f}, perplexity {summary['perplexity']:.2f}"
    )
    table.add_row("speed", f"{summary['samples_per_s']:.1f} samples/s")
    table.add_row("time an update", f"{1000 * summary['seconds_per_update']:.1f} ms")
    table.add_row("share of the limit", f"{summary['of_limit']:.1%} of the ranks' time is computing")
    table.add_row("communication", f"{summary['communication_share']:.1%} sending")
    table.add_row("bubble", f"{summary['bubble_share']:.1%} waiting")
    for stage, peak in enumerate(summary["peak_memory"]):
        table.add_row(f"peak memory, stage {stage}", show_bytes(peak))
    for name in ("report", "checkpoint", "model"):
        if summary.get(name):
            table.add_row(name, os.path.relpath(summary[name]))
    return table
