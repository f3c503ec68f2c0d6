"""The picture of a comparison: throughput on the left, loss against the samples seen on the right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vpipe.cli.compare import Result
from vpipe.errors import VPipeError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which nearly everybody can tell apart; further curves use them again, dashed.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", ":")


def can_plot() -> bool:
    return find_spec("matplotlib") is not None


def plot(results: Sequence[Result], path: Path) -> None:
    """Draw the results into a PNG file."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise VPipeError("a plot needs the package matplotlib: pip install 'vpipe[plot]'") from None
    lines = sum(len(result["label"].split()) for result in results)
    # Its own canvas and not pyplot: no window, no state that other plots would share.
    figure = Figure(figsize=(11, max(4.0, 1.2 + 0.2 * (lines + len(results)))), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.2))
    _throughput(left, results)
    _losses(right, results)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise VPipeError(f"{path}: the plot cannot be written: {error.strerror or error}") from None


def _throughput(axes: Axes, results: Sequence[Result]) -> None:
    speeds = [result["samples_per_s"] for result in results]
    slowest, fastest = min(speeds, default=0.0), max(speeds, default=0.0)
    for place, speed in enumerate(speeds):
        look = _look(place)
        hatch = None if look["linestyle"] == STYLES[0] else "//"
        axes.barh(place, speed, height=0.62, color=look["color"], hatch=hatch, edgecolor="white", linewidth=0)
        ratio = f"  ({speed / slowest:.2f}x)" if slowest > 0 and len(results) > 1 else ""
        weight = "bold" if speed == fastest > slowest else "normal"
        beside: dict[str, Any] = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(f"{speed:,.1f}{ratio}", (speed, place), fontsize=9, fontweight=weight, **beside)
    axes.set_yticks(
        range(len(results)), [result["label"].replace(" ", "\n") for result in results], fontsize=9
    )
    axes.invert_yaxis()  # the first run on top, as in the table
    axes.set_xlim(0, 1.35 * fastest or 1.0)
    axes.set_title("Throughput")
    axes.set_xlabel("samples a second")
    axes.tick_params(axis="y", length=0)


def _losses(axes: Axes, results: Sequence[Result]) -> None:
    """Against samples and not updates: a synchronous update takes many minibatches, an asynchronous one."""
    for place, result in enumerate(results):
        samples = round(result["samples_per_s"] * result["seconds_per_update"])
        curve = [((update + 1) * samples, loss) for update, loss in result["losses"] if math.isfinite(loss)]
        if curve:
            marker = "o" if len(curve) == 1 else None
            axes.plot(
                *zip(*curve, strict=True), label=result["label"], linewidth=1.8, marker=marker, **_look(place)
            )
    axes.set_title("Loss")
    axes.set_xlabel("samples seen")
    axes.grid(axis="y", alpha=0.25)
    if axes.lines:
        axes.legend(frameon=False, fontsize=9)


def _look(place: int) -> dict[str, Any]:
    style = STYLES[place // len(COLOURS) % len(STYLES)]
    return {"color": COLOURS[place % len(COLOURS)], "linestyle": style}
