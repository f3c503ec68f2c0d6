"""Pairs of texts for translation: two aligned files, or docstrings and the names they belong to."""

from __future__ import annotations

import ast
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

from vpipe.data.kind import data_kind
from vpipe.data.text import data_error, library_sources, list_files, read_text

LIBRARY_BYTES = 4 << 20
"""Bytes of the standard library that are parsed: enough for thousands of pairs, within seconds."""


def read_pairs(path: Path | None) -> list[tuple[str, str]]:
    """The lines of two aligned files of a folder; the first by name, such as `source.*`, is translated into the other.

    Pairs of which one side is blank are dropped. Without a path: for each function of Python's standard
    library the first line of its docstring and its name in words, real text from "Return a list of the
    words in the string" to "split words".
    """
    if path is None:
        return library_pairs()
    if data_kind(path) != "text":
        raise data_error(
            path, "it holds no plain text: translation reads a folder with two aligned files of text"
        )
    if os.path.isfile(path):
        raise data_error(path, "it is a file: translation reads a folder with two aligned files")
    files = list_files(path)
    if len(files) != 2:
        raise data_error(
            path,
            f"the folder has {len(files)} files: translation reads exactly two, line by line, "
            "such as source.txt and target.txt",
        )
    source, target = (_lines(read_text(file, path)) for file in files)
    if len(source) != len(target):
        raise data_error(
            path,
            f"{files[0].name} has {len(source)} lines, but {files[1].name} has {len(target)}: "
            "line by line they must be translations of each other",
        )
    pairs = [(left.strip(), right.strip()) for left, right in zip(source, target, strict=True)]
    pairs = [pair for pair in pairs if all(pair)]
    if not pairs:
        raise data_error(path, "no line has text in both files: put UTF-8 text there")
    return pairs


def _lines(text: str) -> list[str]:
    """Only a newline ends a line: `splitlines` also cuts at marks inside sentences, and the files would shift."""
    return text.removesuffix("\n").split("\n")


def library_pairs(largest: int = LIBRARY_BYTES) -> list[tuple[str, str]]:
    """(first line of the docstring, name in words) for the functions of the standard library, each pair once."""
    pairs: dict[tuple[str, str], None] = {}
    for source in library_sources(largest):
        for function in _functions(_body(source)):
            words = " ".join(part for part in function.name.split("_") if part)
            documented = (ast.get_docstring(function) or "").strip()
            if documented and words:
                pairs[documented.splitlines()[0].strip(), words] = None
    return list(pairs)


def _body(source: str) -> list[ast.stmt]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escapes in files that are not ours
        try:
            return ast.parse(source).body
        except SyntaxError:
            return []


def _functions(body: list[ast.stmt]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement
        elif isinstance(statement, ast.ClassDef):
            yield from _functions(statement.body)
