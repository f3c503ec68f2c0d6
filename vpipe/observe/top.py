"""`vpipe top`: what the ranks of a run are doing, from what each last said of itself; refreshed while it runs."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from vpipe.errors import ConfigError
from vpipe.observe.hang import RankState, findings
from vpipe.record.status import RUNNING, Status, read_statuses
from vpipe.system.units import show_bytes

EVERY = 1.0
WIDTH = 30
PARTS = (
    ("forward", "blue"),
    ("backward", "green"),
    ("update", "yellow"),
    ("send", "magenta"),
    ("wait", "bright_black"),
)
LETTERS = {"forward": "F", "backward": "B", "update": "U", "send": "s", "wait": "·"}
"""A bar's letters, so that it can be read without colours."""


def top(folder: Path, *, once: bool) -> None:
    """Show the run until it ends; once, and plainly, if that is asked for or nobody looks at a terminal."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: is not the folder of a run: name one that `vpipe train` has made")
    if not read_statuses(folder) and (once or not sys.stdout.isatty()):
        raise ConfigError(f"{folder}: no rank has said anything yet: its training has not begun")
    if once or not sys.stdout.isatty():
        Console(width=None if sys.stdout.isatty() else 160, highlight=False).print(picture(folder))
        return
    with Live(picture(folder), refresh_per_second=4, screen=False) as live:
        while any(
            not each.fate and each.status.state == RUNNING for each in findings(folder)
        ) or not read_statuses(folder):
            time.sleep(EVERY)
            live.update(picture(folder))


def picture(folder: Path) -> RenderableType:
    found = findings(folder)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in (
        "rank",
        "stage",
        "last seconds",
        "compute",
        "send",
        "wait",
        "memory",
        "in flight",
        "versions",
        "doing",
    ):
        right = name in ("compute", "send", "wait", "memory", "in flight", "versions")
        table.add_column(name, justify="right" if right else "left", no_wrap=name != "doing")
    for each in found:
        table.add_row(*row(each))
    return Group(headline(folder, [each.status for each in found]), table, legend())


def headline(folder: Path, statuses: list[Status]) -> Text:
    if not statuses:
        return Text(f"{folder.name}: no rank has said anything yet")
    first = statuses[0]
    loss = "" if first.loss is None else f", loss {first.loss:.4f}"
    return Text(
        f"{folder.name}: update {first.updates} of {first.total}{loss}, {first.samples_per_s:.1f} samples/s",
        style="bold",
    )


def row(each: RankState) -> list[RenderableType]:
    status = each.status
    shares = shares_of(status)
    computing = shares["forward"] + shares["backward"] + shares["update"]
    return [
        str(status.rank),
        ", ".join(map(str, status.stages)),
        bar(shares),
        f"{computing:.0%}",
        f"{shares['send']:.0%}",
        f"{shares['wait']:.0%}",
        show_bytes(status.memory),
        ", ".join(map(str, status.in_flight)),
        ", ".join(map(str, status.versions)),
        doing(each),
    ]


def shares_of(status: Status) -> dict[str, float]:
    whole = status.times.get("all", 0.0)
    return {name: status.times.get(name, 0.0) / whole if whole else 0.0 for name, _ in PARTS}


def bar(shares: dict[str, float]) -> Text:
    """Where the last seconds went, a letter for each thirtieth; what is left is time between actions."""
    text, reached, drawn = Text(), 0.0, 0
    for name, style in PARTS:
        reached += shares[name]
        length = max(0, min(WIDTH, round(reached * WIDTH)) - drawn)
        text.append(LETTERS[name] * length, style=style)
        drawn += length
    return text.append(" " * (WIDTH - drawn))


def doing(each: RankState) -> str:
    text = str(each)
    return text.removeprefix(f"rank {each.rank} ")


def legend() -> Text:
    text = Text()
    for name, style in PARTS:
        text.append(f"{LETTERS[name]} {name}  ", style=style)
    return text
