"""Plain text as documents: a file, a folder, or the source of Python's standard library."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

from vpipe.errors import ConfigError

LONGEST_DOCUMENT = 1 << 20
"""Characters; a longer file becomes several documents."""
LIBRARY_LARGEST = 8 << 20
"""Bytes of the standard library that are read at most."""
LIBRARY_SKIPPED = {
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
LIBRARY_GENERATED = ("config-", "_sysconfigdata")
"""Beginnings of names whose contents differ from machine to machine."""


def read_documents(path: Path | None) -> list[str]:
    """The texts of a file or folder, one document a file, in the order of their relative paths.

    Hidden files and folders are left out, and links to folders are not followed. Without a path: the source
    text of Python's standard library, which every machine has.
    """
    texts = library_sources() if path is None else [read_text(file, path) for file in list_files(path)]
    documents = [piece for text in texts for piece in split_text(text) if piece.strip()]
    if not documents:
        raise data_error(path, "it holds no text: put UTF-8 text there")
    return documents


def data_error(path: Path | None, text: str) -> ConfigError:
    """An error about the data at `path`."""
    return ConfigError(f"data_dir is {'not given' if path is None else repr(str(path))}: {text}")


def list_files(path: Path) -> list[Path]:
    """The file itself, or the regular files of the folder."""
    if os.path.isfile(path):
        return [path]
    if not os.path.exists(path):
        raise data_error(path, "there is nothing at that place: give a file or folder of text")
    if not os.path.isdir(path):
        raise data_error(path, "it is neither a file nor a folder: give one of the two")

    def refuse(error: OSError) -> None:
        raise data_error(path, f"{error.filename} cannot be listed: {error.strerror}")

    found = [file for file in _walk(path, onerror=refuse) if os.path.isfile(file)]
    if not found:
        raise data_error(path, "the folder has no files: put UTF-8 text there")
    return found


def _walk(
    root: Path,
    skipped: Callable[[str], bool] = lambda name: False,
    onerror: Callable[[OSError], None] | None = None,
) -> list[Path]:
    """All files below a folder, in the order of their relative paths, without hidden and skipped names."""
    found: list[Path] = []
    for folder, folders, names in os.walk(root, onerror=onerror):
        folders[:] = [name for name in folders if not name.startswith(".") and not skipped(name)]
        found += [Path(folder, name) for name in names if not name.startswith(".") and not skipped(name)]
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def read_text(file: Path, path: Path) -> str:
    """One file of the data at `path`, without byte order mark, its lines ended as on Unix."""
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise data_error(path, f"{file} cannot be read: {error.strerror}") from None
    zero = raw.find(b"\0")
    if zero >= 0:
        raise data_error(path, f"{file} is binary (byte {zero} is zero): leave only UTF-8 text there")
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise data_error(
            path,
            f"{file} is not UTF-8 (byte {error.start} is {raw[error.start]:#04x}): "
            "convert it, or leave only UTF-8 text there",
        ) from None


def split_text(text: str, longest: int = LONGEST_DOCUMENT) -> Iterator[str]:
    """Pieces that make up the text again, cut at blank lines, or at lines or spaces where there are none."""
    start = 0
    while len(text) - start > longest:
        end = _last_break(text, start, start + longest)
        yield text[start:end]
        start = end
    yield text[start:]


def _last_break(text: str, start: int, stop: int) -> int:
    for mark in ("\n\n", "\n", " "):
        found = text.rfind(mark, start, stop)
        if found >= 0:
            return found + len(mark)
    return stop


def library_sources(largest: int = LIBRARY_LARGEST) -> list[str]:
    """Its files in the order of their names, as many as fit into `largest` bytes; the same for a Python version."""
    root = Path(sysconfig.get_paths()["stdlib"])
    sources: list[str] = []
    room = largest
    for file in _walk(root, lambda name: name in LIBRARY_SKIPPED or name.startswith(LIBRARY_GENERATED)):
        source = _read_source(file)
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


def _read_source(file: Path) -> str | None:
    """None for a file that is no Python or no text: the user did not choose these files."""
    if file.suffix != ".py":
        return None
    try:
        source = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return source if source.strip() and "\0" not in source else None
