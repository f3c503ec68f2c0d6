"""The plot of docs/scaling.md: for each model and link the share of the card that each schedule reaches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from scaling_models import MODELS
from scaling_pipeline import ALONE
from scaling_rows import Row

STYLES = {
    ALONE: ("#777777", ":", "x"),
    "1f1b": ("#1f77b4", "-", "o"),
    "zb-h1": ("#17a2a2", "-", "s"),
    "zb-v": ("#2ca02c", "-", "^"),
    "interleaved": ("#9467bd", "-", "D"),
    "gpipe": ("#8c564b", "-", "v"),
    "2bw": ("#ff7f0e", "--", "P"),
    "pipedream": ("#d62728", "--", "X"),
}
"""Colour, line and mark. Dashed: asynchronous."""


def plot(rows: Sequence[Row], path: Path) -> None:
    with matplotlib.rc_context({"svg.hashsalt": "scaling", "svg.fonttype": "none", "font.size": 9}):
        draw(rows).print_svg(path, metadata={"Date": None})


def draw(rows: Sequence[Row]) -> FigureCanvasSVG:
    gigabits = sorted({row.gigabits for row in rows}, reverse=True)
    figure = Figure(figsize=(11, 5.6), layout="constrained")
    canvas = FigureCanvasSVG(figure)
    axes = figure.subplots(len(gigabits), len(MODELS), sharex=True, sharey=True, squeeze=False)
    counts = sorted({row.gpus for row in rows})
    for line, link in zip(axes, gigabits, strict=True):
        for axis, model in zip(line, MODELS, strict=True):
            for schedule, (colour, dash, mark) in STYLES.items():
                found = [
                    row
                    for row in rows
                    if (row.model, row.gigabits, row.schedule) == (model.name, link, schedule)
                    and row.tokens_per_second
                ]
                best = {
                    count: max((row.of_card for row in found if row.gpus == count), default=None)
                    for count in counts
                }
                points = [(count, share) for count, share in best.items() if share is not None]
                axis.plot(
                    [count for count, _ in points],
                    [100 * share for _, share in points],
                    color=colour,
                    linestyle=dash,
                    marker=mark,
                    markersize=4,
                    linewidth=1.2,
                    label=schedule,
                )
            axis.set_xscale("log", base=2)
            axis.set_xticks(counts, [f"{count:,}" for count in counts], rotation=45)
            axis.set_ylim(0, 100)
            axis.grid(alpha=0.25)
            axis.set_title(f"{model.name}, {link} Gbit/s")
    for axis in axes[-1]:
        axis.set_xlabel("GPUs, 8 a host")
    for line in axes:
        line[0].set_ylabel("% of the card's bf16 speed")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(STYLES), frameon=False)
    return canvas
