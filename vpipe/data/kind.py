"""The kind of the data at a path, by the names of its files."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from vpipe.data.records import is_saved
from vpipe.data.shards import has_shards
from vpipe.data.text import data_error, list_files

DataKind = Literal["text", "jsonl", "parquet", "tokens", "saved", "shards"]
SUFFIXES: dict[str, DataKind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".bin": "tokens",
}


def data_kind(path: Path | None) -> DataKind:
    """Text unless its files' suffixes say otherwise; all files of a folder must be of one kind."""
    if path is None:
        return "text"
    if is_saved(path):
        return "saved"
    if has_shards(path):
        return "shards"
    kinds = {SUFFIXES.get(file.suffix.lower(), "text"): file.name for file in list_files(path)}
    if len(kinds) > 1:
        (first, one), (second, other) = list(kinds.items())[:2]
        raise data_error(
            path,
            f"the folder has files of two kinds, {one} ({first}) and {other} ({second}): keep one kind in it, or name "
            "a file",
        )
    return next(iter(kinds))
