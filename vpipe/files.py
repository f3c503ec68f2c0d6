"""Text and JSON files, with one line for what goes wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vpipe.errors import ConfigError, VPipeError


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
