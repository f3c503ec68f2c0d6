"""The reference of the configuration: complete, in plain words, and what stands in docs/config.md."""

from pathlib import Path
from typing import Any

import pytest

from vpipe.config import RunConfig
from vpipe.config.docs import config_markdown, sections, words

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == config_markdown(), "docs/config.md is old: run `make docs`"


def test_every_key_is_in_one_section() -> None:
    listed = [key for keys in sections().values() for key in keys]
    assert listed == list(RunConfig.model_fields)
    assert list(sections())[:2] == ["The model", "The data"]


def test_every_key_is_one_row_of_four_cells() -> None:
    rows = [line for line in config_markdown().splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == list(RunConfig.model_fields)
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 4
        assert cells[1]
        assert "any value" not in cells[1]
        assert cells[3]


@pytest.mark.parametrize(
    "row",
    [
        "| `batch_size` | whole number, 1 or more | `8` | Samples of a minibatch, which all",
        "| `sync_mode` | `asp`, `bsp` |  | bsp: the minibatches",
        "| `recompute_ratio` | number, from 0 to 1; or list of numbers, each from 0 to 1 |  | Share of",
        "| `partition` | list of whole numbers, each 1 or more; or text |  | Blocks of each stage",
        "| `synthetic_data` | `true` or `false` | `false` | Train on random tokens",
        "| `dropout` | number, 0 or more and less than 1 | `0.1` |",
    ],
)
def test_rows(row: str) -> None:
    assert f"\n{row}" in config_markdown()


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"const": "x"}, "`x`"),
        (
            {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            "list of lists of whole numbers",
        ),
        ({"type": "number", "maximum": 3}, "number, 3 or less"),
        ({"type": "object"}, "mapping"),
        ({}, "any value"),
    ],
)
def test_words(schema: dict[str, Any], expected: str) -> None:
    assert words(schema) == expected
