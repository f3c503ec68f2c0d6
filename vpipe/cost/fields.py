"""The fields of profile and plan files: a dataclass states each one once, and pydantic reads files by that.

Objects that are made in Python are plain dataclasses: nothing checks them, so the planner makes them fast. Of an
object of a file the keys are checked here, and each number by the `Unit` of its field.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast, get_args, get_origin, get_type_hints

from pydantic import GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from vpipe.errors import ConfigError
from vpipe.system.files import read_json, short_repr
from vpipe.system.validation import first_mistake, unknown_key

LARGEST = 1e18
"""Of any figure: seconds, bytes, bytes a second. A larger one is a typing error."""

Read = TypeVar("Read")
_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def finite(value: Any) -> float | None:
    """The value as a number that one can compute with, if it is one: neither infinite nor close to it."""
    try:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return float(value) if number and math.isfinite(value) and abs(value) <= LARGEST else None
    except OverflowError:  # a whole number too large for a float
        return None


@dataclass(frozen=True)
class Unit:
    """The unit of a number, its limits, and whether it scales with the minibatch: `Annotated[int, Unit("bytes")]`."""

    name: str
    least: float = 0
    most: float = LARGEST
    positive: bool = False
    """More than 0."""
    scales: bool = False
    """It depends on the samples of a minibatch."""

    def expected(self, whole: bool) -> str:
        if self.most < LARGEST:
            return f"{self.name}, from {self.least:g} to {self.most:g}"
        limit = "more than 0" if self.positive else f"{self.least:g} or more"
        return f"{self.name}: a whole number, {limit}" if whole else f"{self.name}, {limit}"

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        whole = source is int  # one written as 1e9 counts as well
        least = 1 / LARGEST if self.positive else self.least

        def check(value: Any) -> float:
            number = finite(value)
            if number is None or not least <= number <= self.most or (whole and value != int(value)):
                raise ValueError(self.expected(whole))
            return int(value) if whole else number

        return core_schema.no_info_plain_validator_function(check)


class FileField(NamedTuple):
    hint: Any
    unit: Unit | None
    whole: bool
    required: bool


class FileObject:
    """Base of a dataclass that is an object of a file: no key is unknown, and none that it needs is missing."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(cls._check_keys, handler(source))

    @classmethod
    def _check_keys(cls: Any, values: Any) -> dict[str, Any]:
        if not isinstance(values, dict):
            raise ValueError(_expected(cls))
        known = file_fields(cls)
        for key, value in values.items():
            if key not in known:
                raise mistake(unknown_key(key, value, known.keys()))
        for key, entry in known.items():
            if entry.required and key not in values:
                raise mistake(f"{key} is missing: expected {_expected(entry.hint)}")
        return values


def mistake(text: str) -> PydanticCustomError:
    """An error of a whole object, with words that follow its place."""
    return PydanticCustomError("mistake", "{text}", {"text": text})


def read_object(kind: type[Read], path: Path) -> Read:
    """A dataclass from a JSON file; a mistake in it is an error of one line."""
    values = read_json(path)
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: holds {short_repr(values)}, not an object: expected {_expected(kind)}")
    try:
        return cast(Read, _adapter(kind).validate_python(values))
    except ValidationError as error:
        raise ConfigError(f"{path}: {first_mistake(error, values)}") from None


@cache
def file_fields(kind: Any) -> dict[str, FileField]:
    """The fields of a dataclass by their keys in the file."""
    hints = get_type_hints(kind, include_extras=True)
    found = {}
    for entry in fields(kind):
        if entry.metadata.get("in_file", True):
            hint = hints[entry.name]
            unit, whole = _unit(hint)
            required = entry.default is MISSING and entry.default_factory is MISSING
            found[_key(entry.name, hint)] = FileField(hint, unit, whole, required)
    return found


def _unit(hint: Any) -> tuple[Unit | None, bool]:
    """The unit of `Annotated[int, Unit(...)]`, or of that or None, and whether it is one of whole numbers."""
    for part in (hint, *get_args(hint)):
        for entry in getattr(part, "__metadata__", ()):
            if isinstance(entry, Unit):
                return entry, get_args(part)[0] is int
    return None, False


def _key(name: str, hint: Any) -> str:
    infos = [entry for entry in getattr(hint, "__metadata__", ()) if isinstance(entry, FieldInfo)]
    return next((info.alias for info in infos if info.alias), name)


def _expected(hint: Any) -> str:
    """The words for a type of field."""
    unit, whole = _unit(hint)
    if unit is not None:
        return unit.expected(whole)
    plain: Any = get_args(hint)[0] if hasattr(hint, "__metadata__") else hint
    if get_origin(plain) is tuple:
        return f"a list, each entry {_expected(get_args(plain)[0])}"
    if is_dataclass(cast(Any, plain)):
        required = (key for key, entry in file_fields(plain).items() if entry.required)
        return f"an object with {', '.join(required)}"
    return "text"
