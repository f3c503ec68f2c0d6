"""Text, JSON and YAML files, with errors of one line. YAML is read as plain values and nothing else."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from reprlib import Repr
from typing import Any, TextIO

import yaml

from vpipe.errors import ConfigError, NotWrittenError

DEEPEST = 20
TAIL = 1 << 20
"""The most bytes that are read of the end of a file that may be long."""
_REPR = Repr()
_REPR.maxlevel, _REPR.maxlist, _REPR.maxdict, _REPR.maxstring, _REPR.maxlong = 3, 30, 30, 100, 60


def short_repr(value: Any) -> str:
    """At most 60 characters, however large or deep the value is."""
    text = _REPR.repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not a text file in UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # a path that no file system has, such as one with a zero byte in it
        raise ConfigError(f"{str(path)!r}: cannot be read: {error}") from None


def read_tail(path: Path, start: int = 0) -> str:
    """The last `TAIL` bytes of a file, and none before `start`; nothing if it cannot be read."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(start, end - TAIL))
            return file.read(TAIL).decode(errors="replace")
    except OSError:
        return ""


def write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise NotWrittenError(f"{path}: cannot be written: {error.strerror or error}") from None


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """Write beside the file and rename: a reader finds the old text or the new one, never a part, and so does a disk
    that is full."""
    beside = path.with_name(f"{path.name}.new")
    try:
        with beside.open("w", encoding="utf-8") as file:
            yield file
        os.replace(beside, path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink()
        raise NotWrittenError(f"{path}: cannot be written: {error.strerror or error}") from None


def replace_text(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text)


def read_json(path: Path) -> Any:
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from None


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """An object, a line for each key and for each entry of its lists of objects: easy to read and to compare."""
    lines = [f"  {json_text(key)}: {_entries(value)}" for key, value in values.items()]
    replace_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def _entries(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(f"    {json_text(entry)}" for entry in value) + "\n  ]"
    return json_text(value)


def json_text(value: Any, *, ascii: bool = False) -> str:
    """One line of JSON as its standard has it: a number that is not finite, which it has no word for, is null.

    `ascii` is for terminals, which may know no other letters.
    """
    try:
        return json.dumps(value, ensure_ascii=ascii, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), ensure_ascii=ascii, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


class _PlainLoader(yaml.SafeLoader):
    """Values and nothing else: no objects, no aliases, with which a few lines can stand for gigabytes, and no brackets
    nested deeper than DEEPEST: the scanner's time grows with the square of their number.
    """

    def fetch_flow_collection_start(self, kind: Any) -> None:
        if self.flow_level >= DEEPEST:
            raise yaml.MarkedYAMLError(problem="brackets are nested too deep", problem_mark=self.get_mark())
        super().fetch_flow_collection_start(kind)

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not read", problem_mark=mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value!r} stands twice", problem_mark=key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Any:
    """The plain value that the text writes down; raises YAMLError with one line, whatever is wrong with it."""
    try:
        return yaml.load(text, _PlainLoader)
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f"line {error.problem_mark.line + 1}: "
        raise yaml.YAMLError(line + " ".join((error.problem or "it is not YAML").split())[:200]) from None
    except Exception as error:  # `!!bool x` is a KeyError there, `!!timestamp x` an AttributeError, ...
        reason = " ".join(str(error).split())[:200]
        raise yaml.YAMLError(f"cannot be read as YAML: {type(error).__name__}: {reason}") from None
