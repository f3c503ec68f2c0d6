"""Text, JSON and YAML files, with one line for what goes wrong.

YAML is read as plain data: it makes values and can do nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from reprlib import Repr
from typing import Any

import yaml

from vpipe.errors import ConfigError, VPipeError

DEEPEST = 20
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


def write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise VPipeError(f"{path}: cannot be written: {error.strerror or error}") from None


def read_json(path: Path) -> Any:
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from None


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """An object, a line for each key and for each entry of its lists of objects: easy to read and to compare."""
    lines = [f"  {_text(key)}: {_entries(value)}" for key, value in values.items()]
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def _entries(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(f"    {_text(entry)}" for entry in value) + "\n  ]"
    return _text(value)


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


class _PlainLoader(yaml.SafeLoader):
    """Values and nothing else: no objects, no aliases, with which a few lines can stand for gigabytes, and no brackets
    nested deeper than anybody would: the scanner's time grows with the square of their number.
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
