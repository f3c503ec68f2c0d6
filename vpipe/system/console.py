"""The console: tables and text, in which names are shown as they are and never obeyed."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vpipe.errors import printable
from vpipe.system.narrow import fitted


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


def show(table: Table) -> None:
    # Names are long; a file or a pipe has no width that they must fit into.
    console = PlainConsole(width=None if Console().is_terminal else 200)
    console.print(fitted(table, console))
