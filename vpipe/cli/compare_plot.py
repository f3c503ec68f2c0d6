"""Pictures of comparisons, as PNG files: bars of throughput, and losses over samples and over time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vpipe.errors import VPipeError
from vpipe.schedule.palette import SERIES_LIGHT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES = ("-", "--", ":")
"""Of curves; where the colours are used up, they are repeated with the next one."""


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the results into a PNG file."""
    # Between two dollars matplotlib reads a formula.
    results = [result | {"label": result["label"].replace("$", r"\$")} for result in results]
    lines = sum(len(result["label"].split()) for result in results)
    height = max(4.0, 1.2 + 0.2 * (lines + len(results)))
    with draw(path, 3, height, widths=(1, 1.2, 1.2)) as (left, middle, right):
        _throughput(left, results)
        _losses(middle, results, "samples seen")
        _losses(right, results, "seconds of training")
        if middle.lines:
            middle.legend(frameon=False, fontsize=9)


@contextmanager
def draw(path: Path, parts: int, height: float = 4.5, widths: Sequence[float] = ()) -> Iterator[list[Axes]]:
    """The parts of a picture, side by side; it is written to a PNG file when they are drawn."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise VPipeError("a picture needs the package matplotlib: pip install 'vpipe[plot]'") from None

    # Not pyplot, which has global state and may open a window.
    figure = Figure(figsize=(max(11, 5 * parts), height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    drawn = list(figure.subplots(1, parts, width_ratios=widths or None, squeeze=False)[0])
    yield drawn
    for axes in drawn:
        axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise VPipeError(f"{path}: the plot cannot be written: {error.strerror or error}") from None


def _throughput(axes: Axes, results: Sequence[dict[str, Any]]) -> None:
    speeds = [result["samples_per_s"] for result in results]
    slowest, fastest = min(speeds, default=0.0), max(speeds, default=0.0)
    for row, speed in enumerate(speeds):
        look = curve_look(row)
        hatch = None if look["linestyle"] == STYLES[0] else "//"
        bar = axes.barh(
            row, speed, height=0.62, color=look["color"], hatch=hatch, edgecolor="white", linewidth=0
        )
        ratio = f"  ({speed / slowest:.2f}x)" if slowest > 0 and len(results) > 1 else ""
        weight = "bold" if speed == fastest > slowest else "normal"
        axes.bar_label(bar, [f"{speed:,.1f}{ratio}"], padding=4, fontsize=9, fontweight=weight)
    axes.set_yticks(
        range(len(results)), [result["label"].replace(" ", "\n") for result in results], fontsize=9
    )
    axes.invert_yaxis()  # the first run on top, as in the table
    axes.set_xlim(0, 1.35 * fastest or 1.0)
    axes.set_title("Throughput")
    axes.set_xlabel("samples a second")
    axes.tick_params(axis="y", length=0)


def _losses(axes: Axes, results: Sequence[dict[str, Any]], across: str) -> None:
    """Against samples or time, not updates: synchronous updates have many minibatches, asynchronous ones one."""
    for row, result in enumerate(results):
        of_update = result["seconds_per_update"]
        if across == "samples seen":
            of_update = round(result["samples_per_s"] * of_update)
        curve = [
            ((update + 1) * of_update, loss)
            for update, loss in result["losses"]
            if loss is not None and math.isfinite(loss)
        ]
        if curve:
            marker = "o" if len(curve) == 1 else None
            axes.plot(
                *zip(*curve, strict=True),
                label=result["label"],
                linewidth=1.8,
                marker=marker,
                **curve_look(row),
            )
    axes.set_title("Loss")
    axes.set_xlabel(across)
    axes.grid(axis="y", alpha=0.25)


def curve_look(row: int) -> dict[str, Any]:
    style = STYLES[row // len(SERIES_LIGHT) % len(STYLES)]
    return {"color": SERIES_LIGHT[row % len(SERIES_LIGHT)], "linestyle": style}
