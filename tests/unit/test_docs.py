"""The pages of the docs: lines of at most 100 characters, links and paths that exist, Chinese in step with English."""

import re
from pathlib import Path

import pytest

from tests.pages import ROOT, fenced, read_page, without_blocks

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FOLDERS = [ROOT, ROOT / "vpipe", ROOT / "tests", ROOT / "configs"]
"""Where a path that the docs name may begin."""


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


page = pytest.mark.parametrize("page", PAGES, ids=name)


def prose(page: Path) -> list[str]:
    """The lines of a page without its code blocks and tables."""
    text = without_blocks(page.read_text(encoding="utf-8"))
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


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    named = set(re.findall(r": ([\w.-]+\.md)$", read_page("mkdocs.yml"), re.MULTILINE))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= named


# README.zh-CN.md and docs/tutorial.zh-CN.md

PAIRS = [("README.md", "README.zh-CN.md"), ("docs/tutorial.md", "docs/tutorial.zh-CN.md")]
pair = pytest.mark.parametrize(("english", "chinese"), PAIRS)


@pair
def test_headings_have_the_same_levels(english: str, chinese: str) -> None:
    levels = [
        re.findall(r"^#+ ", without_blocks(read_page(page)), re.MULTILINE) for page in (english, chinese)
    ]
    assert levels[0] == levels[1]


@pair
def test_code_is_the_same(english: str, chinese: str) -> None:
    assert fenced(read_page(chinese)) == fenced(read_page(english))


@pair
def test_pictures_and_tables_are_the_same(english: str, chinese: str) -> None:
    for pattern in (r"^!\[.*\]\((.*)\)$", r"^\|()"):
        found = [re.findall(pattern, read_page(page), re.MULTILINE) for page in (english, chinese)]
        assert found[0] == found[1]
