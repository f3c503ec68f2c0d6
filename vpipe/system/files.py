"""Text, JSON and YAML files: bounded, with errors of one line. YAML is read as plain values and nothing else."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from reprlib import Repr
from typing import Any, TextIO

import yaml

from vpipe.errors import ConfigError, NotWrittenError, VPipeError

DEEPEST = 20
TAIL = 1 << 20
"""The most bytes that are read of the end of a file that may be long."""
SMALL = 4 << 20
"""Bytes of a file that a user gives: a plan, a profile, a table. Reading so much of any content takes a second."""
SMALL_YAML = 64 << 10
"""YAML is read more slowly."""
LARGE = 64 << 20
"""Bytes of a file that names every tensor of a large model."""
LONGEST_INTEGER = 1024
"""Bits."""
LONGEST_NAME, LONGEST_PATH = 255, 4095
"""Bytes, on Linux."""
_REPR = Repr()
_REPR.maxlevel, _REPR.maxlist, _REPR.maxdict, _REPR.maxstring, _REPR.maxlong = 3, 30, 30, 100, 60


def short_repr(value: Any) -> str:
    """At most 60 characters, however large or deep the value is."""
    text = _REPR.repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def read_text(path: Path, *, most: int = SMALL) -> str:
    """The text of a file of at most so many bytes. What never ends, such as a device or a FIFO, is not read."""
    try:
        return read_bounded(path, most).decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not a text file in UTF-8") from None


def read_bounded(path: Path, most: int) -> bytes:
    """The content of a regular file of at most so many bytes."""
    with path_errors(path, "read"):
        # Without O_NONBLOCK the opening of a FIFO waits for somebody who writes to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(f"{path}: is {_kind(mode)}, not a file: give a file")
            content = file.read(most + 1)
    if len(content) > most:
        raise ConfigError(f"{path}: has more than {most:,} bytes, the most that is read of such a file")
    return content


def read_tail(path: Path, start: int = 0) -> str:
    """The last `TAIL` bytes of a file, and none before `start`; nothing if it cannot be read."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(start, end - TAIL))
            return file.read(TAIL).decode(errors="replace")
    except OSError:
        return ""


def check_place(path: Path) -> None:
    """Raise before long work whose result goes to a file that no folder can hold."""
    with path_errors(path, "written"):
        if not stat.S_ISDIR(path.parent.stat().st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))


def write_text(path: Path, text: str) -> None:
    with path_errors(path, "written"):
        path.write_text(text, encoding="utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """Write beside the file and rename: a reader finds the old text or the new one, never a part, and so does a disk
    that is full."""
    beside = path.with_name(f"{path.name}.new")
    with path_errors(path, "written"):
        try:
            with beside.open("w", encoding="utf-8") as file:
                yield file
            os.replace(beside, path)
        except OSError:
            with suppress(OSError):
                beside.unlink()
            raise


def replace_text(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text)


@contextmanager
def path_errors(path: Path | str, done: str) -> Iterator[None]:
    """Turn what the system says of a path into an error of one line; `done` says what was to be done with it."""
    kind = NotWrittenError if done == "written" else ConfigError
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if isinstance(error, FileNotFoundError) and os.path.islink(path):
            reason = f"it is a symbolic link to {os.readlink(path)!r}, and nothing is there"
        raise kind(f"{path}: cannot be {done}: {reason}") from None
    except UnicodeError:
        raise kind(f"{path}: cannot be {done}: it has characters that UTF-8 does not have") from None
    except ValueError as error:
        if isinstance(error, VPipeError):
            raise
        raise kind(f"{path}: cannot be {done}: {error}") from None  # a zero byte in the path


def is_file(path: Path) -> bool:
    """Whether there is a regular file; raises if that cannot be known (no permission, a circle of links)."""
    mode = _mode(path)
    return mode is not None and stat.S_ISREG(mode)


def is_folder(path: Path) -> bool:
    """Whether there is a folder; raises like `is_file`."""
    mode = _mode(path)
    return mode is not None and stat.S_ISDIR(mode)


def near(path: Path | str) -> str:
    """The path from here, if it is below the current directory; or else the whole path."""
    relative = os.path.relpath(path)
    return os.path.abspath(path) if relative.startswith(os.pardir) else relative


def exists(path: Path) -> bool:
    """Whether there is anything; raises like `is_file`."""
    return _mode(path) is not None


def _mode(path: Path) -> int | None:
    with path_errors(path, "looked at"):
        try:
            return os.stat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            if os.path.islink(path):
                raise
            return None


def _kind(mode: int) -> str:
    kinds = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def link_mistake(path: Path) -> str:
    """What is said of a symbolic link in the place of a folder."""
    with path_errors(path, "read"):
        return (
            f"{path} is a symbolic link to {os.readlink(path)!r}, and no link is taken for a checkpoint: "
            "move the folder here, or name the place where it is"
        )


def check_path(written: str) -> str:
    """The path, unless no file system can have it: a part of more than 255 bytes, a zero byte."""
    try:
        parts = [len(os.fsencode(part)) for part in written.split("/")]
    except UnicodeError:
        raise ValueError("a path in UTF-8") from None
    if "\0" in written or max(parts) > LONGEST_NAME or sum(parts) + len(parts) > LONGEST_PATH:
        raise ValueError(
            f"a path without zero bytes, of {LONGEST_PATH} bytes and {LONGEST_NAME} a part at most"
        )
    return written


def read_json(path: Path, *, most: int = SMALL) -> Any:
    text = read_text(path, most=most)
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
    """One line of JSON as its standard has it, that a terminal may show.

    A number that is not finite, for which JSON has no word, is null; lone surrogates and control characters are
    escaped. `ascii` is for terminals, which may know no other letters.
    """
    try:
        text = json.dumps(value, ensure_ascii=ascii, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), ensure_ascii=ascii, allow_nan=False)
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else json.dumps(letter)[1:-1] for letter in text)


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

    def construct_yaml_int(self, node: Any) -> int:
        """Written in hexadecimal it may be longer than Python writes numbers."""
        value: int = super().construct_yaml_int(node)
        if value.bit_length() > LONGEST_INTEGER:
            raise yaml.MarkedYAMLError(problem="a whole number is too long", problem_mark=node.start_mark)
        return value

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value!r} stands twice", problem_mark=key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


_PlainLoader.add_constructor("tag:yaml.org,2002:int", _PlainLoader.construct_yaml_int)


def parse_yaml(text: str) -> Any:
    """The plain value that the text writes down; raises YAMLError with one line, whatever is wrong with it."""
    if len(text) > SMALL_YAML:
        raise yaml.YAMLError(f"has more than {SMALL_YAML:,} characters, the most that is read as YAML")
    try:
        return yaml.load(text, _PlainLoader)
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f"line {error.problem_mark.line + 1}: "
        raise yaml.YAMLError(line + " ".join((error.problem or "it is not YAML").split())[:200]) from None
    except Exception as error:  # `!!bool x` is a KeyError there, `!!timestamp x` an AttributeError, ...
        reason = " ".join(str(error).split())[:200]
        raise yaml.YAMLError(f"cannot be read as YAML: {type(error).__name__}: {reason}") from None
