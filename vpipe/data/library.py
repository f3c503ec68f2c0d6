"""The source of Python's standard library: real text that every machine has."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from vpipe.errors import ConfigError

LARGEST = 8 << 20
"""Bytes that are read at most."""
LEFT_OUT = {
    "__pycache__",
    "dist-packages",
    "encodings",  # tables of code points
    "idlelib",
    "lib2to3",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}
OF_THE_MACHINE = ("config-", "_sysconfigdata")
"""Beginnings of names whose contents differ from machine to machine."""


def library_sources(largest: int = LARGEST) -> list[str]:
    """Its files in the order of their names, as many as fit into `largest` bytes; the same for a Python version."""
    root = Path(sysconfig.get_paths()["stdlib"])
    sources: list[str] = []
    room = largest
    for file in _files(root):
        source = _read(file)
        if source is None:
            continue
        room -= len(source.encode())
        if room < 0:
            break
        sources.append(source)
    if not sources:
        raise ConfigError(
            f"data_dir is not given, and this Python has no source of its standard library in {root}: "
            "give data_dir, a file or folder of text"
        )
    return sources


def _files(root: Path) -> list[Path]:
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in LEFT_OUT and _wanted(name)]
        found += [Path(folder, name) for name in names if name.endswith(".py") and _wanted(name)]
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def _wanted(name: str) -> bool:
    return not name.startswith((".", *OF_THE_MACHINE))


def _read(file: Path) -> str | None:
    """None for what is no text: nobody chose these files, so none of them is a mistake."""
    try:
        source = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return source if source.strip() and "\0" not in source else None
