"""Losses of several runs in the terminal: curves over samples and over time, and when each reached the same loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.table import Table

from vpipe.observe.loss_curves import final_loss, reached, smoothed
from vpipe.system.units import duration

WIDTH, HEIGHT = 72, 12
"""Of a plot, in letters."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SEVERAL = "#"
"""Where curves cross."""

Points = list[tuple[float, float]]


class LossRun(NamedTuple):
    """The losses of a run with what an update of it took."""

    label: str
    updates: list[int]
    """Made when each loss was known; of a long run not all are kept."""
    losses: list[float]
    samples: float
    """Of an update."""
    seconds: float
    """Of an update, without start, evaluations and saves."""

    @property
    def final(self) -> float:
        return final_loss(self.losses)

    def updates_to(self, goal: float) -> int | None:
        place = reached(self.losses, goal)
        return None if place is None else self.updates[place]

    def curve(self, per_update: float) -> Points:
        return [
            (made * per_update, loss)
            for made, loss in zip(self.updates, smoothed(self.losses), strict=True)
            if math.isfinite(loss)
        ]


def loss_run(result: dict[str, Any]) -> LossRun | None:
    """From a run's summary; None if it has no losses, or not how long they took."""
    points = [(update + 1, loss) for update, loss in result.get("losses") or () if loss is not None]
    seconds = result.get("seconds_per_update") or 0.0
    if not points or not seconds or not all(math.isfinite(loss) for _, loss in points):
        return None
    updates, losses = zip(*points, strict=True)
    samples = round(result["samples_per_s"] * seconds)
    return LossRun(result["label"], list(updates), list(losses), samples, seconds)


def goal_of(runs: Sequence[LossRun]) -> float:
    """The highest of the losses at the end: one that all runs reach."""
    return max(run.final for run in runs)


def figures_to(run: LossRun, goal: float) -> dict[str, Any]:
    """What `--json` says of it."""
    updates = run.updates_to(goal)
    return {
        "loss": goal,
        "updates": updates,
        "samples": None if updates is None else updates * run.samples,
        "seconds": None if updates is None else updates * run.seconds,
    }


def loss_table(runs: Sequence[LossRun]) -> Table:
    goal = goal_of(runs)
    table = Table(
        title=f"Until the loss was {goal:.4g}, the highest of the losses at the end",
        caption="losses are means over a tenth of the run; time is that of training, without start, evaluations and "
        "saves; the first to reach it is marked *",
        caption_justify="left",
    )
    for column in ("", "run", "loss at the end", "samples", "time"):
        table.add_column(column, justify="left" if column in ("", "run") else "right", overflow="fold")
    found = [figures_to(run, goal) for run in runs]
    least = min((figures["seconds"] for figures in found if figures["seconds"] is not None), default=None)
    for letter, run, figures in zip(_letters(len(runs)), runs, found, strict=True):
        samples, seconds = figures["samples"], figures["seconds"]
        table.add_row(
            letter,
            run.label,
            f"{run.final:.4f}",
            "–" if samples is None else f"{samples:,.0f}",
            "–" if seconds is None else duration(seconds) + (" *" if seconds == least else ""),
        )
    return table


def loss_plots(runs: Sequence[LossRun]) -> str:
    """The curves over samples, and over time below them."""
    return "\n".join(
        [
            *text_plot([run.curve(run.samples) for run in runs], "samples"),
            "",
            *text_plot([run.curve(run.seconds) for run in runs], "seconds of training"),
        ]
    )


def text_plot(curves: Sequence[Points], across: str) -> list[str]:
    """Lines of text; each curve is drawn with a letter of its own."""
    points = [point for curve in curves for point in curve]
    last = max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    grid = [[" "] * WIDTH for _ in range(HEIGHT)]
    for letter, curve in zip(_letters(len(curves)), curves, strict=True):
        for column, value in _columns(curve, last).items():
            row = round((high - value) / (high - low or 1) * (HEIGHT - 1))
            grid[row][column] = letter if grid[row][column] == " " else SEVERAL
    marks = {0: f"{high:.3f}", HEIGHT - 1: f"{low:.3f}", HEIGHT // 2: "loss"}
    margin = max(map(len, marks.values()))
    lines = [f"{marks.get(row, ''):>{margin}} │{''.join(cells).rstrip()}" for row, cells in enumerate(grid)]
    end = f"{last:,.0f}" if last >= 100 else f"{last:.3g}"
    title = f"0{across:^{WIDTH - 1 - len(end)}}{end}"
    return [*lines, f"{'':>{margin}} └{'─' * WIDTH}", f"{'':>{margin}}  {title}"]


def _columns(curve: Points, last: float) -> dict[int, float]:
    """The value of a curve in each column that it passes, straight between its points."""
    found: dict[int, float] = {}
    for (x, y), (to_x, to_y) in zip(curve, [*curve[1:], curve[-1]], strict=True):
        start, end = (min(WIDTH - 1, int(place / last * WIDTH)) for place in (x, to_x))
        for column in range(start, end + 1):
            share = (column - start) / (end - start) if end > start else 0.0
            found[column] = y + share * (to_y - y)
    return found


def _letters(count: int) -> list[str]:
    return [LETTERS[number % len(LETTERS)] for number in range(count)]
