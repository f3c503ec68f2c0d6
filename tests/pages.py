"""The pages of the docs, as tests read them: their code blocks and headings."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def read_page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def fenced(page: str) -> list[tuple[str, str]]:
    """Language and text of each code block."""
    # text, language, block, "", text, language ...
    parts = re.split(r"^```(\w*)\n", page, flags=re.MULTILINE)
    return list(zip(parts[1::4], parts[2::4], strict=True))


def blocks(language: str, page: str) -> list[str]:
    """The code blocks of one language."""
    return [block for found, block in fenced(page) if found == language]


def without_blocks(page: str) -> str:
    return re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
