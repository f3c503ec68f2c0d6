"""The pages of the docs: lines of at most 100 characters, links and paths that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FOLDERS = [ROOT, ROOT / "vpipe", ROOT / "tests", ROOT / "configs"]
"""Where a path that the docs name may begin."""


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


page = pytest.mark.parametrize("page", PAGES, ids=name)


def prose(page: Path) -> list[str]:
    """The lines of a page without its code blocks and tables."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [line for line in text.splitlines() if not line.startswith("|")]


def slug(heading: str) -> str:
    """The anchor that a heading gets."""
    return re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-")


@page
def test_lines_have_at_most_100_characters(page: Path) -> None:
    # A line of one long word, such as a link, cannot be broken.
    assert [line for line in prose(page) if len(line) > 100 and " " in line.strip()] == []


@page
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in map(slug, headings), link


@page
def test_paths_in_backticks_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for path in re.findall(r"`([\w.=-]+/[\w./=-]*\.(?:py|md|yml|svg))[`: ]", text):
        assert any((folder / path).exists() for folder in FOLDERS), path
