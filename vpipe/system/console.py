"""Tables on the console."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table


def show(table: Table) -> None:
    console = Console()
    # Names are long; a file or a pipe has no width that they must fit into.
    Console(width=None if console.is_terminal else 200).print(table)
