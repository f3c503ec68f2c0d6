"""Documents of records: JSON lines, parquet files, and folders that the package `datasets` has saved."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vpipe.data.text import data_error, list_files, split_text
from vpipe.errors import ConfigError

FIELDS = ("text", "messages")
"""Fields that are looked for in a record, if the user names none."""
LONGEST_LINE = 64 << 20
"""Bytes of a line of JSON: a longer one is taken for a file without ends of lines."""
ROWS = 256
"""Rows of a table that are read at a time."""
SAVED = ("dataset_dict.json", "dataset_info.json")
"""Files that `save_to_disk` writes beside the data."""


class Conversation(NamedTuple):
    """The messages of one record, each with a role and a content, and where it was read."""

    messages: list[dict[str, str]]
    place: str

    @property
    def key(self) -> str:
        """No text and no other messages have this one."""
        return "\0" + json.dumps(self.messages, ensure_ascii=False)


Document = str | Conversation
Rows = Iterator[tuple[str, dict[str, Any]]]
"""Each record with its place, for messages."""


def text_of(document: Document) -> str:
    """The words that a tokenizer learns from."""
    if isinstance(document, str):
        return document
    return "\n".join(f"{message['role']}: {message['content']}" for message in document.messages)


@dataclass(frozen=True)
class Records:
    """Documents that are read from disk whenever they are iterated: they may be larger than memory."""

    path: Path
    field: str | None
    read: Callable[[], Rows]

    def __iter__(self) -> Iterator[Document]:
        for place, record in self.read():
            document = self._document(place, record)
            if isinstance(document, Conversation):
                yield document
            else:
                yield from (piece for piece in split_text(document) if piece.strip())

    def _document(self, place: str, record: dict[str, Any]) -> Document:
        name = self._field(place, record)
        value = record[name]
        if isinstance(value, str):
            self._check_text(value, f"{place}: {name!r}")
            return value
        if not isinstance(value, list):
            raise data_error(
                self.path,
                f"{place}: {name!r} is of type {type(value).__name__}: give a text, or a list of messages",
            )
        return Conversation(self._messages(value, f"{place}: {name!r}"), place)

    def _field(self, place: str, record: dict[str, Any]) -> str:
        if self.field is not None:
            if self.field not in record:
                raise data_error(
                    self.path,
                    f"{place}: there is no field {self.field!r} (data_field), only {_names(record)}: name one of them",
                )
            return self.field
        found = [name for name in FIELDS if record.get(name) is not None]
        if len(found) == 1:
            return found[0]
        problem = (
            "both 'text' and 'messages'" if found else f"neither 'text' nor 'messages', only {_names(record)}"
        )
        raise data_error(
            self.path, f"{place}: the record has {problem}: name the one to read with data_field"
        )

    def _messages(self, messages: list[Any], place: str) -> list[dict[str, str]]:
        for number, message in enumerate(messages):
            here = f"{place}, message {number}"
            for key in ("role", "content"):
                if not isinstance(message, dict) or not isinstance(message.get(key), str):
                    raise data_error(
                        self.path,
                        f'{here} has no text as {key!r}: write {{"role": "user", "content": "..."}}',
                    )
                self._check_text(message[key], here)
        if not any(message["role"] == "assistant" for message in messages):
            raise data_error(
                self.path,
                f"{place} has no message of the role 'assistant', which are trained on: leave it out",
            )
        return [{"role": message["role"], "content": message["content"]} for message in messages]

    def _check_text(self, text: str, place: str) -> None:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise data_error(
                self.path,
                f"{place} has half of a surrogate pair (character {error.start}): write it as UTF-8",
            ) from None


def is_saved(path: Path | None) -> bool:
    """Whether it is a folder that `save_to_disk` of the package `datasets` wrote."""
    return path is not None and any(os.path.isfile(path / name) for name in SAVED)


def read_records(path: Path, kind: str, field: str | None) -> Records:
    """The records of a file or folder of `jsonl` or `parquet`."""
    files = list_files(path)

    def rows() -> Rows:
        for file in files:
            yield from _json_lines(file, path) if kind == "jsonl" else _parquet_rows(file, path, field)

    return Records(path, field, rows)


def read_saved(path: Path, field: str | None) -> Records:
    """The rows of a saved data set; of several splits those of `train`."""
    datasets = _optional("datasets", path, "it was saved by the package datasets")
    try:
        table = datasets.load_from_disk(str(path))
    except Exception as error:  # of a damaged folder: almost anything
        raise data_error(path, f"it cannot be loaded as a saved data set: {_short(error)}") from None
    if isinstance(table, dict):
        if "train" not in table:
            raise data_error(
                path, f"it has no split 'train', only {_names(table)}: name the folder of one of them"
            )
        table = table["train"]
    columns = _columns(table.column_names, field)

    def rows() -> Rows:
        batches = table.select_columns(columns).with_format("arrow").iter(ROWS)
        yield from _numbered((batch.to_pylist() for batch in batches), path)

    return Records(path, field, rows)


def _json_lines(file: Path, path: Path) -> Rows:
    try:
        with file.open("rb") as lines:
            number = 0
            while line := lines.readline(LONGEST_LINE + 1):
                number += 1
                place = f"{file}, line {number}"
                if len(line) > LONGEST_LINE:
                    raise data_error(
                        path,
                        f"{place} has more than {LONGEST_LINE} bytes: write each record on a line of its own",
                    )
                if line.strip():
                    yield (
                        place,
                        _parsed(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line, place, path),
                    )
    except OSError as error:
        raise data_error(path, f"{file} cannot be read: {error.strerror}") from None


def _parsed(line: bytes, place: str, path: Path) -> dict[str, Any]:
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise data_error(
            path,
            f"{place} is not UTF-8 (byte {error.start} of it is {line[error.start]:#04x}): convert the file",
        ) from None
    except (ValueError, RecursionError) as error:
        raise data_error(
            path, f"{place} is not JSON ({_short(error)}): write one object on each line"
        ) from None
    if not isinstance(record, dict):
        raise data_error(
            path, f'{place} is of type {type(record).__name__}: write an object, such as {{"text": "..."}}'
        )
    return record


def _parquet_rows(file: Path, path: Path, field: str | None) -> Rows:
    parquet = _optional("pyarrow.parquet", path, f"{file} is a parquet file")
    try:
        with parquet.ParquetFile(file, pre_buffer=False) as table:
            batches = table.iter_batches(ROWS, columns=_columns(table.schema_arrow.names, field))
            yield from _numbered((batch.to_pylist() for batch in batches), file)
    except (ConfigError, GeneratorExit):
        raise
    except Exception as error:  # of a damaged file: almost anything
        raise data_error(path, f"{file} cannot be read as parquet: {_short(error)}") from None


def _columns(names: Sequence[str], field: str | None) -> list[str]:
    """What is read of a table: the fields that may be meant, or all if there is none, for the message."""
    wanted = FIELDS if field is None else (field,)
    return [name for name in names if name in wanted] or list(names)


def _numbered(batches: Iterable[Sequence[dict[str, Any]]], file: Path) -> Rows:
    number = 0
    for rows in batches:
        for row in rows:
            yield f"{file}, row {number}", row
            number += 1


def _optional(module: str, path: Path, what: str) -> Any:
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError:
        raise data_error(path, f"{what}, and {package} is not installed: pip install {package}") from None


def _names(record: Iterable[str]) -> str:
    return ", ".join(repr(str(name))[:40] for name in sorted(map(str, record))[:8]) or "nothing"


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
