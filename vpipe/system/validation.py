"""The first mistake that pydantic finds in the values of a file, in one line: place, field, value, fix."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from vpipe.errors import meant
from vpipe.system.files import short_repr

_EXPECTED = {
    "model_type": "a mapping",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "an object",
    "string_too_short": "some text",
    "too_short": "a list with something in it",
    "too_long": "{max_length} entries or fewer",
    "finite_number": "a number that is not infinite",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "{ge:g} or more",
    "less_than": "less than {lt:g}",
    "less_than_equal": "{le:g} or less",
    "string_pattern_mismatch": "text such as 'vgpus=4'",
    "literal_error": "{expected}",
    "value_error": "{error}",
}
"""The words for pydantic's types of errors, with what their context holds; others are shown in pydantic's words."""


def unknown_key(
    key: Any, value: Any, known: Collection[str], other_names: Mapping[str, str] | None = None
) -> str:
    """`other_names`: known keys by names that users may take them for."""
    ours = (other_names or {}).get(str(key).lower().replace("-", "_"))
    hint = f"did you mean {ours!r}?" if ours in known else meant(str(key), known, "known keys are")
    return f"unknown key {short_repr(key)} (its value is {short_repr(value)}): {hint}"


def first_mistake(error: ValidationError, values: Any) -> str:
    """Of the values that were validated; an error of the type "mistake" has words of its own for a whole object."""
    found = [(_path(details, values), details) for details in error.errors(include_url=False)]
    path = found[0][0]
    # A field that may be of several types has an error for each of them; one inside a list says the most.
    for other, _ in found:
        if other[: len(path)] == path:
            path = other
    here = [details for other, details in found if other == path]
    if here[0]["type"] == "mistake":
        return ": ".join([*_places(path, values), here[0]["msg"]])
    value = values
    for part in path:
        value = value[part]
    *places, field = _places(path, values)
    expected = " or ".join(dict.fromkeys(map(_expected, here)))
    return ": ".join([*places, f"{field} is {short_repr(value)}", f"expected {expected}"])


def _path(details: ErrorDetails, values: Any) -> list[Any]:
    """Keys and numbers from the whole to the wrong value, without pydantic's names for one of several types."""
    path: list[Any] = []
    part: Any
    for part in details["loc"]:
        if (isinstance(values, dict) and part in values) or (
            isinstance(values, list) and isinstance(part, int)
        ):
            values = values[part]
            path.append(part)
    return path


def _places(path: list[Any], values: Any) -> list[str]:
    """The objects on the way to the wrong value, and its key: ["blocks, entry 1 (head)", "forward"]."""
    places: list[str] = []
    for part in path:
        values = values[part]
        if isinstance(part, int) and places:
            name = values.get("name") if isinstance(values, dict) else None
            places[-1] += f", entry {part}" + (
                f" ({short_repr(name)[1:-1]})" if isinstance(name, str) else ""
            )
        else:
            places.append(str(part))
    return places


def _expected(details: ErrorDetails) -> str:
    if details["type"] == "missing":
        return f"the key {details['loc'][-1]!r}"
    words = _EXPECTED.get(details["type"])
    return details["msg"] if words is None else words.format(**details.get("ctx", {}))
