"""Pages of the site that are files elsewhere in the repository, and links as the site needs them.

The pages are written for readers of the repository: README.md links to docs/python.md, that to ../SECURITY.md. Here
both become links between pages of the site. A link to another file of the repository becomes plain text.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": "index.md",
    "README.zh-CN.md": "index.zh-CN.md",
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples.md",
    "examples/threads.ipynb": "threads.md",
}
"""Files outside of docs/, and the pages that they become."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
LIST = re.compile(r"(- |\d+\. |\|)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in PAGES.items():
        path, folder = ROOT / source, posixpath.dirname(source)
        text = notebook(path) if path.suffix == ".ipynb" else path.read_text(encoding="utf-8")
        text = translated(text, folder)
        if page == "examples.md":
            text += "".join(map(script, sorted(path.parent.glob("*.py"))))
        files.append(File.generated(config, page, content=text))
    limits = translated(section(ROOT / "README.md", "Limits"), "")
    files.append(File.generated(config, "limits.md", content=limits))
    return files


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    if page.file.generated_by is None:
        markdown = translated(markdown, posixpath.dirname(f"docs/{page.file.src_uri}"))
    # Browsers show a line break as a space, which Chinese does not have.
    return spaced(re.sub(r"(?<=[，。；：、）])\n(?=[^\s|#!>-])(?!```)", "", markdown))


def translated(text: str, folder: str) -> str:
    """The text of a file in this folder of the repository, with links between pages of the site."""

    def link(match: re.Match[str]) -> str:
        picture, name, target = match.groups()
        path, mark, anchor = target.partition("#")
        if not path or "://" in path:
            return match[0]
        file = posixpath.normpath(posixpath.join(folder, path))
        if folder.startswith("docs") and file.startswith("docs/"):
            return match[0]
        page = PAGES.get(file) or (file.removeprefix("docs/") if file.startswith("docs/") else None)
        if page is None:
            assert (ROOT / file).exists(), target
            return name
        depth = folder.count("/") if folder.startswith("docs") else 0
        return f"{picture}[{name}]({'../' * depth}{page}{mark}{anchor})"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in parts)


def spaced(text: str) -> str:
    """As Python's Markdown needs it and GitHub does not: an empty line before lists and tables, inner lists deeper."""
    lines: list[str] = []
    code = False
    for line in text.splitlines():
        before = lines[-1] if lines else ""
        begins = (
            LIST.match(line) and before.strip() and not LIST.match(before) and not before.startswith("  ")
        )
        if not code and begins:
            lines.append("")
        code ^= line.lstrip().startswith("```")
        lines.append(f"  {line}" if not code and line.startswith("  - ") else line)
    return "\n".join(lines)


def section(path: Path, title: str) -> str:
    """One section of a page as a page."""
    found = re.search(
        rf"^## ({title}\n.*?)(?=^## )", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    assert found is not None
    return f"# {found[1]}"


def script(path: Path) -> str:
    """A file of code as a section."""
    return f"\n## {path.name}\n```python\n{path.read_text(encoding='utf-8')}```\n"


def notebook(path: Path) -> str:
    """The cells of a notebook, with the outputs that are stored in it."""
    parts: list[str] = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            html = "".join(output.get("data", {}).get("text/html", ()))
            printed = "".join(output.get("text", ()))
            parts += [f'<div class="output">\n{html}</div>'] if html else []
            parts += [f"```text\n{printed}```"] if printed else []
    return "\n\n".join(parts)
