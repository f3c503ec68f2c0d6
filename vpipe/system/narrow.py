"""Tables on a narrow terminal: nothing in them is cut off, and no word or number is broken.

A table that fits is left as it is. Otherwise it loses its frame, the words of its headings stand below each other, and
long names go on in the next line behind a dot, a slash or the like. If that is not enough, it becomes several tables
below each other, each beginning with the first column.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

ENOUGH = 16
"""A column of sentences or names is not made narrower than this."""
GAP = 2
"""Columns of the terminal between two of a table."""
PIECES = re.compile(r"[^\s./_+,:=-]*[\s./_+,:=-]*")
"""Of a name or a sentence: it may go on in the next line behind each."""
WIDE = 10_000


def fitted(table: Table, console: Console) -> RenderableType:
    """The table, or what shows the same in the width of the console."""
    anywhere = console.options.update(max_width=WIDE)
    if Measurement.get(console, anywhere, table).maximum <= console.width:
        return table
    columns = [_narrowed(column, table.show_header) for column in table.columns]
    tables = [_joined(table, band, console.width) for band in _bands(columns, console.width)]
    texts = [(table.title, "bold"), (table.caption, "italic")]
    title, caption = ([console.render_str(str(text), style=style)] if text else [] for text, style in texts)
    parts: list[RenderableType] = list(title)
    for number, each in enumerate(tables):
        parts += [each] if number == 0 else [Text(), each]
    return Group(*parts, *caption)


@dataclass(frozen=True)
class _NarrowColumn:
    source: Column
    heading: str
    cells: list[Text]
    least: int
    """Its width if all that may be broken is."""
    most: int


def _narrowed(column: Column, with_heading: bool) -> _NarrowColumn:
    heading = str(column.header) if with_heading else ""
    cells = [cell if isinstance(cell, Text) else Text(str(cell)) for cell in column.cells]
    lines = [line for cell in cells for line in cell.plain.split("\n")]
    most = max(map(cell_len, (*lines, *heading.split())), default=0)
    if column.overflow != "fold":
        return _NarrowColumn(column, heading, cells, most, most)
    pieces = [piece.rstrip() for line in lines for piece in PIECES.findall(line)]
    least = max(map(cell_len, (*pieces, *heading.split())), default=0)
    return _NarrowColumn(column, heading, cells, max(least, min(most, ENOUGH)), most)


def _bands(columns: list[_NarrowColumn], width: int) -> list[list[_NarrowColumn]]:
    """As many columns together as fit, each group with the first one."""
    first, *rest = columns
    bands = [[first]]
    for column in rest:
        if sum(each.least + GAP for each in bands[-1]) + column.least > width and len(bands[-1]) > 1:
            bands.append([first])
        bands[-1].append(column)
    return bands


def _joined(table: Table, band: list[_NarrowColumn], width: int) -> Table:
    """A table of these columns; those that may be broken share the width that is left."""
    room = width - sum(column.least + GAP for column in band) + GAP
    joined = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), show_header=table.show_header)
    shown = []
    for column in band:
        more = max(0, min(room, column.most - column.least))
        room -= more
        joined.add_column(
            broken(Text(column.heading), column.least + more),
            justify=column.source.justify,
            style=column.source.style,
            no_wrap=True,
            vertical="top",
        )
        shown.append([broken(cell, column.least + more) for cell in column.cells])
    for row, cells in zip(table.rows, zip(*shown, strict=True), strict=True):
        joined.add_row(*cells, style=row.style)
    return joined


def broken(text: Text, width: int) -> Text:
    """In lines of at most this width, if its pieces permit."""
    if max(map(cell_len, text.plain.split("\n"))) <= width:
        return text
    lines = []
    for line in text.plain.split("\n"):
        lines.append("")
        for piece in PIECES.findall(line):
            if piece and lines[-1] and cell_len((lines[-1] + piece).rstrip()) > width:
                lines.append("")
            lines[-1] += piece
    return Text("\n".join(line.rstrip() for line in lines), style=text.style)
