"""Tables on terminals of 60 to 200 columns: whole words and numbers, and nothing that is cut off."""

import io
import re

import pytest
from rich.table import Table
from rich.text import Text

from vpipe.system.console import PlainConsole
from vpipe.system.narrow import broken, fitted

NAMES = ("bert.encoder.layer.0.attention", "bert.encoder.layer.23/intermediate+output")
FIGURES = ("609.3 us", "397.3 us", "94.37 us", "1,234,567", "97.12 KiB", "23%")


def table() -> Table:
    made = Table(title="two blocks", caption="and this is all that can be said about them")
    made.add_column("block", justify="right")
    made.add_column("name", overflow="fold")
    for heading in ("forward", "input gradient", "weight gradient", "parameters", "kept", "spread"):
        made.add_column(heading, justify="right")
    for number, name in enumerate(NAMES):
        made.add_row(str(number), Text(name), *FIGURES)
    return made


def shown(width: int) -> str:
    console = PlainConsole(width=width, file=io.StringIO(), record=True)
    console.print(fitted(table(), console))
    return console.export_text()


@pytest.mark.parametrize("width", [60, 80, 90, 100, 110, 200])
def test_nothing_is_cut_off_or_broken_in_a_word(width: int) -> None:
    text = shown(width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for figure in FIGURES:
        assert text.count(figure) == 2, (width, text)
    words = {word for name in NAMES for word in re.findall(r"\w+", name)} | {"gradient", "parameters"}
    assert words <= set(re.findall(r"\w+", text))
    assert "two blocks" in text
    assert "and this is all" in text


def test_a_table_that_fits_is_left_alone() -> None:
    assert "┃" in shown(200)
    assert "┃" not in shown(80)


def test_what_does_not_fit_goes_below_behind_the_first_column() -> None:
    headings = [line.split()[0] for line in shown(60).splitlines() if "block" in line][1:]
    assert headings == ["block"] * len(headings)
    assert len(headings) > 1


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("a.b/c", 5, ["a.b/c"]),
        ("layer.0/output", 8, ["layer.0/", "output"]),
        ("waits for rank 1", 9, ["waits for", "rank 1"]),
        ("unbreakable", 4, ["unbreakable"]),
        ("two\nlines here", 5, ["two", "lines", "here"]),
    ],
)
def test_text_is_broken_behind_its_marks(text: str, width: int, lines: list[str]) -> None:
    assert broken(Text(text), width).plain.split("\n") == lines
