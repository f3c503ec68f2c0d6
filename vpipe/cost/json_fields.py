"""The fields of a JSON object, checked one by one: every mistake names file, place, field, value and fix."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from difflib import get_close_matches
from reprlib import Repr
from typing import Any

from vpipe.errors import ConfigError

_REPR = Repr()
_REPR.maxlevel, _REPR.maxlist, _REPR.maxdict, _REPR.maxlong = 3, 8, 8, 24

LARGEST = 1e18
"""Of any figure: seconds, bytes, bytes a second. What is larger is a slip of the pen."""


def shown(value: Any) -> str:
    """A value as a message shows it: in short, however large or deep it is."""
    text = json.dumps(value) if value is None or isinstance(value, bool | str) else _REPR.repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def finite(value: Any) -> float | None:
    """The value as a number that one can go on computing with, if it is one: neither infinite nor close to it."""
    try:
        return float(value) if is_number(value) and math.isfinite(value) and abs(value) <= LARGEST else None
    except OverflowError:  # a whole number too large for a float
        return None


class Fields:
    """An object of a JSON file. `place` begins every message: the file, and where in it the object stands."""

    def __init__(self, values: Any, place: str, known: Collection[str], example: str) -> None:
        self.place = place
        if not isinstance(values, dict):
            raise ConfigError(f"{place}: holds {shown(values)}, not an object: write {example}")
        self.values: dict[str, Any] = values
        for key in values:
            if key not in known:
                close = get_close_matches(key, known, n=1, cutoff=0.6)
                hint = f"did you mean {close[0]!r}?" if close else f"known keys are {', '.join(known)}"
                raise ConfigError(f"{place}: unknown key {shown(key)}: {hint}")

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def fault(self, key: str, expected: str) -> ConfigError:
        if key not in self.values:
            return ConfigError(f"{self.place}: {key} is missing: it must be {expected}")
        return ConfigError(f"{self.place}: {key} is {shown(self.values[key])}: it must be {expected}")

    def required(self, key: str, expected: str) -> Any:
        if key not in self.values:
            raise self.fault(key, expected)
        return self.values[key]

    def number(
        self, key: str, unit: str, *, least: float = 0, default: float | None = None, positive: bool = False
    ) -> float:
        """A finite number."""
        expected = f"{unit}, {'more than 0' if positive else f'{least} or more'}"
        if key not in self.values and default is not None:
            return default
        value = finite(self.required(key, expected))
        if value is None or value < least or (positive and value < 1 / LARGEST):
            raise self.fault(key, expected)
        return value

    def count(self, key: str, unit: str, *, least: int = 0, default: int | None = None) -> int:
        """A whole number; one written as 1e9 counts as well."""
        expected = f"{unit}: a whole number, {least} or more"
        if key not in self.values and default is not None:
            return default
        value = self.required(key, expected)
        if finite(value) is None or value != int(value) or value < least:
            raise self.fault(key, expected)
        return int(value)

    def optional_number(self, key: str, unit: str) -> float | None:
        return None if self.values.get(key) is None else self.number(key, unit)

    def optional_count(self, key: str, unit: str, *, least: int = 1) -> int | None:
        return None if self.values.get(key) is None else self.count(key, unit, least=least)

    def text(self, key: str, default: str) -> str:
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise self.fault(key, "text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.fault(key, "true or false")
        return value

    def items(self, key: str, expected: str, *, empty: bool = False) -> list[Any]:
        value = self.required(key, expected)
        if not isinstance(value, list) or not (value or empty):
            raise self.fault(key, expected)
        return value
