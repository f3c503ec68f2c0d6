"""A run on the terminal: its progress, its summary, and `vpipe top`, a table of its ranks that is refreshed."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from vpipe.errors import ConfigError, printable
from vpipe.observe.hang import RankState, rank_states
from vpipe.record.run_folder import check_run_folder
from vpipe.record.status import RUNNING, TIMES, Status, time_shares
from vpipe.schedule.palette import DARK
from vpipe.system.console import PlainConsole
from vpipe.system.files import near
from vpipe.system.narrow import fitted
from vpipe.system.units import show_bytes

# Progress


class ProgressReport:
    """Progress as rank 0 sees it: a live bar on a terminal, plain lines anywhere else. Other ranks' are silent."""

    def __init__(self, total: int, done: int, *, speaks: bool, live: bool = True) -> None:
        """If it is not `live`, it shows only lines given to `say`."""
        self._live = live
        self._console = PlainConsole(soft_wrap=True, quiet=not speaks)
        self._bar: Progress | None = None
        if speaks and live and sys.stdout.isatty():
            count = TextColumn("update {task.completed:.0f}/{task.total:.0f}")
            figures = TextColumn("{task.fields[figures]}", style="cyan", markup=False)
            self._bar = Progress(
                count, BarColumn(None), figures, TimeRemainingColumn(), console=self._console
            )
            self._task = self._bar.add_task("train", total=total, completed=done, figures="")
            self._bar.start()

    def say(self, line: str) -> None:
        """A line that stays."""
        self._console.print(line)

    def update(self, done: int, loss: float, figures: dict[str, float], line: str | None) -> None:
        """Move the bar; without one print `line`, unless it is None."""
        speed = (
            f"lr {figures['learning_rate']:.2e}, {speed_text(figures)}, {show_bytes(figures['peak_memory'])}"
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=done, figures=f"loss {loss:.4f}, {speed}")
        elif line is not None and self._live:
            self.say(f"{line}, {speed}")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


TOO_SHORT = "too few updates to measure the speed"
"""In the first ones the pipeline fills up, and they are left out."""


def speed_text(figures: Mapping[str, float | None]) -> str:
    """Samples a second and, as far as they are known, tokens and the share of the cards' peak."""
    if not figures["samples_per_s"]:
        return TOO_SHORT
    tokens, mfu = figures.get("tokens_per_s"), figures.get("mfu")
    return (
        f"{figures['samples_per_s']:.1f} samples/s"
        + ("" if tokens is None else f", {tokens:.0f} tokens/s")
        + ("" if mfu is None else f", mfu {mfu:.1%}")
    )


# Summary


def summary_table(summary: dict[str, Any]) -> Table:
    """The end of a run in one table."""
    table = Table(title=f"{summary['schedule']}, {len(summary['ranks'])} ranks", show_header=False)
    table.add_column("figure", style="bold", no_wrap=True)
    table.add_column("value", overflow="fold")
    first = f", {summary['losses'][0][1]:.4f} at first" if summary["losses"] else ""
    loss, evaluated = summary["loss"], summary["evaluation_loss"]
    computing, sending, waiting = (
        summary[name] for name in ("of_limit", "communication_share", "bubble_share")
    )
    between = max(0.0, 1.0 - computing - sending - waiting)
    perplexity = "" if summary["perplexity"] is None else f", perplexity {summary['perplexity']:.2f}"
    rows = {
        "loss": f"{'none' if loss is None else f'{loss:.4f}'} after {summary['updates']} updates{first}",
        "evaluation": "none" if evaluated is None else f"loss {evaluated:.4f}{perplexity}",
        **{name: f"{value:.4f}" for name, value in summary.get("metrics", {}).items()},
        "speed": speed_text(summary),
    }
    measured = {
        "time an update": f"{1000 * summary['seconds_per_update']:.1f} ms",
        "share of the limit": f"{computing:.1%} of the ranks' time is computing",
        "communication": f"{sending:.1%} sending",
        "bubble": f"{waiting:.1%} waiting for messages, {between:.1%} between actions",
    }
    if summary["samples_per_s"]:
        rows |= measured
    if phases := summary.get("phases"):
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in phases.items() if seconds >= 0.05)
        rows["start"] = f"{sum(phases.values()):.1f} s to the first update: {parts}"
    peaks: dict[str, int] = {}  # by the stages of a rank, the most of its replicas
    for rank in summary["ranks"]:
        held = f"stage{'s' * (len(rank['stages']) > 1)} {', '.join(map(str, rank['stages']))}"
        peaks[held] = max(peaks.get(held, 0), rank["peak_memory"])
    rows |= {f"peak memory, {held}": show_bytes(peak) for held, peak in peaks.items()}
    if summary["skipped_updates"]:
        rows["skipped"] = f"{summary['skipped_updates']} updates, whose gradients were not finite"
    if summary["lost_writes"]:
        rows["lost"] = f"{summary['lost_writes']} writes failed, the first: {summary['first_lost_write']}"
    rows |= {name: near(summary[name]) for name in ("report", "checkpoint", "model") if summary.get(name)}
    for name, value in rows.items():
        table.add_row(name, value)
    return table


# vpipe top

EVERY = 1.0
WIDE, WIDTH, SHORT = 120, 30, 10
"""Letters of a bar: on terminals of so many columns, and on narrower ones."""
COLOURS = ("forward", "backward", "update", "send", "quiet")
STYLES = dict(zip(TIMES, (DARK[name] for name in COLOURS), strict=True))
LETTERS = dict(zip(TIMES, "FBUs·", strict=True))
"""The letters of a bar, so that it can be read without colours."""


def top(folder: Path, *, once: bool) -> None:
    """Show the run until it ends; just once, without refreshing, if `once` or if the output is no terminal."""
    check_run_folder(folder)
    terminal = sys.stdout.isatty()
    if once or not terminal:
        if not rank_states(folder):
            raise ConfigError(f"{folder}: no rank has written a status yet: its training has not begun")
        console = PlainConsole(width=None if terminal else 160)
        console.print(picture(folder, console))
        return
    console = PlainConsole()
    with Live(picture(folder, console), console=console, refresh_per_second=4, screen=False) as live:
        while not (states := rank_states(folder)) or any(
            not each.fate and each.status.state == RUNNING for each in states
        ):
            time.sleep(EVERY)
            live.update(picture(folder, console))


def picture(folder: Path, console: Console) -> RenderableType:
    found = rank_states(folder)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("rank", "stage", "last seconds"):
        table.add_column(name, no_wrap=True)
    for name in ("compute", "send", "wait", "memory", "in flight", "versions"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("doing", overflow="fold")
    for each in found:
        table.add_row(*_row(each, WIDTH if console.width >= WIDE else SHORT))
    legend = Text("  ").join(Text(f"{LETTERS[name]} {name}", style=STYLES[name]) for name in TIMES)
    return Group(_headline(folder, [each.status for each in found]), fitted(table, console), legend)


def _headline(folder: Path, statuses: list[Status]) -> Text:
    if not statuses:
        return Text(f"{printable(folder.name)}: no rank has written a status yet")
    first = statuses[0]
    loss = "" if first.loss is None else f", loss {first.loss:.4f}"
    of = f" of {first.total}" if first.total else ""
    lost = sum(status.lost_writes for status in statuses)
    speed = speed_text({name: getattr(first, name) for name in ("samples_per_s", "tokens_per_s", "mfu")})
    return Text(
        f"{printable(folder.name)}: update {first.updates}{of}{loss}, {speed}"
        + (f", {lost} writes failed" if lost else ""),
        style="bold",
    )


def _row(each: RankState, width: int) -> list[RenderableType]:
    status = each.status
    times = dict.fromkeys((*TIMES, "all"), 0.0) | status.times
    shares = time_shares(times | {"clock": times["all"]})
    return [
        str(status.rank),
        ", ".join(map(str, status.stages)),
        _bar(times, width),
        *(f"{shares[name]:.0%}" for name in ("compute_share", "communication_share", "bubble_share")),
        show_bytes(status.memory),
        ", ".join(map(str, status.in_flight)),
        ", ".join(map(str, status.versions)),
        str(each).removeprefix(f"rank {each.rank} "),
    ]


def _bar(times: dict[str, float], width: int) -> Text:
    """The last seconds, `width` letters for all of them; the rest is time between actions."""
    whole = max(times["all"], sum(times[name] for name in TIMES)) or 1.0
    text, reached, drawn = Text(), 0.0, 0
    for name in TIMES:
        reached += times[name] / whole
        length = max(0, round(reached * width) - drawn)
        text.append(LETTERS[name] * length, style=STYLES[name])
        drawn += length
    return text.append(" " * (width - drawn))
