"""The console: tables, text and progress, in which names are shown as they are and never obeyed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vpipe.errors import printable
from vpipe.system.narrow import fitted

LINE_EVERY = 30.0
"""Seconds between two lines about long work where there is no terminal."""
Report = Callable[[float, str], object]
"""Takes how much of the work is done, from 0 to 1, and what is being done."""


class PlainConsole(Console):
    """Text is text: neither rich's markup nor a terminal's control characters in it mean anything."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text, lines=True), **options)


def announce(text: str) -> None:
    """Say what is being done, before it takes its time: a command that is silent for seconds seems to hang.

    On the standard error, so that a command's output stays its result.
    """
    inform(f"{text} ...")


def warn(text: str) -> None:
    inform(f"warning: {text}")


def inform(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)


@contextmanager
def progress() -> Iterator[Report]:
    """Shows how far long work is, on the standard error: a bar on a terminal, now and then a line anywhere else."""
    if not sys.stderr.isatty():
        said = time.monotonic()

        def write(done: float, text: str) -> None:
            nonlocal said
            if time.monotonic() - said >= LINE_EVERY:
                said = time.monotonic()
                inform(f"{done:.0%}: {text}")

        yield write
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn  # for this alone

    columns = (TextColumn("{task.description}", markup=False), BarColumn(None), TimeRemainingColumn())
    with Progress(*columns, console=PlainConsole(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda done, text: bar.update(task, completed=done, description=text)


def unreported(done: float, text: str) -> None:
    """For work of which nobody wants to know how far it is."""


def show(table: Table) -> None:
    # Names are long; a file or a pipe has no width that they must fit into.
    console = PlainConsole(width=None if Console().is_terminal else 200)
    console.print(fitted(table, console))
