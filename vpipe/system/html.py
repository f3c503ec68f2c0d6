"""Tables of the terminal as HTML, for notebooks; without scripts and styles of the page."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from rich.table import Table
from rich.text import Text

from vpipe.errors import printable


def html_table(table: Table) -> str:
    """The table with its title above and its caption below it; names are shown as they are and never obeyed."""
    lines = [f"<p><b>{_text(table.title)}</b></p>"] if table.title else []
    lines.append("<table>")
    if table.show_header:
        lines.append(_row("th", (column.header for column in table.columns)))
    lines += [_row("td", cells) for cells in zip(*(column.cells for column in table.columns), strict=True)]
    lines.append("</table>")
    if table.caption:
        lines.append(f"<p>{_text(table.caption)}</p>")
    return "\n".join(lines) + "\n"


def _row(tag: str, cells: Iterable[object]) -> str:
    return "<tr>" + "".join(f"<{tag}>{_text(cell)}</{tag}>" for cell in cells) + "</tr>"


def _text(cell: object) -> str:
    return escape(printable(cell.plain if isinstance(cell, Text) else cell))
