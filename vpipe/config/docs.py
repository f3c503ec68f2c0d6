"""The reference of the configuration, generated from its pydantic model (`python -m vpipe.config.docs`)."""

from __future__ import annotations

import inspect
import json
import re
from typing import Any

from vpipe.config.keys import LARGEST, RunConfig

INTRODUCTION = """\
# Configuration

Every key of a run's YAML file. This page is generated from `vpipe/config/keys.py` by `make docs`;
do not edit it.

```yaml
model_type: bert
stages: 2
batch_size: 16
```

All keys may be left out. Paths are relative to the file that names them, unless the key says
otherwise. A key that does not exist, or a value of the wrong type, is refused with the key's name
and what was expected.
"""

_NOUNS = {
    "integer": ("whole number", "whole numbers"),
    "number": ("number", "numbers"),
    "string": ("text", "texts"),
    "boolean": ("`true` or `false`", "`true` or `false`"),
    "object": ("mapping", "mappings"),
}


def config_markdown() -> str:
    """The whole page."""
    properties = RunConfig.model_json_schema()["properties"]
    parts = [INTRODUCTION]
    for section, keys in sections().items():
        rows = [_row(key, properties[key]) for key in keys]
        header = ["| key | value | default | meaning |", "|---|---|---|---|"]
        parts.append("\n".join([f"## {section}", *header, *rows, ""]))
    return "\n".join(parts)


def sections() -> dict[str, list[str]]:
    """The keys under the comments of the source that head them."""
    found: dict[str, list[str]] = {}
    for line in inspect.getsource(RunConfig).splitlines():
        if heading := re.fullmatch(r"    # (\w.*)", line):
            found[heading[1]] = []
        elif (field := re.match(r"    (\w+): ", line)) and field[1] in RunConfig.model_fields:
            list(found.values())[-1].append(field[1])
    return {section: keys for section, keys in found.items() if keys}


def words(schema: dict[str, Any], plural: bool = False) -> str:
    """What a JSON schema allows, in plain words; null is left out, as such a key need not be written."""
    if "anyOf" in schema:
        options = [words(option, plural) for option in schema["anyOf"] if option.get("type") != "null"]
        return "; or ".join(options)
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"{'lists' if plural else 'list'} of {words(schema.get('items', {}), plural=True)}"
    kind = "object" if "$ref" in schema else schema.get("type", "")
    noun = _NOUNS.get(kind, ("any value", "any values"))[plural]
    limits = _limits(schema)
    return f"{noun}, {'each ' if plural else ''}{limits}" if limits else noun


def _limits(schema: dict[str, Any]) -> str:
    # Behind a custom validator pydantic writes its own names for the limits.
    low, high = (schema.get(name, schema.get(own)) for name, own in (("minimum", "ge"), ("maximum", "le")))
    above, below = (
        schema.get(f"exclusive{name}", schema.get(own))
        for name, own in (("Minimum", "gt"), ("Maximum", "lt"))
    )
    if high == LARGEST:
        high = None  # a bound against mistakes, not worth a word
    if low is not None and high is not None:
        return f"from {low:g} to {high:g}"
    limits = (
        (low, "{:g} or more"),
        (above, "more than {:g}"),
        (high, "{:g} or less"),
        (below, "less than {:g}"),
    )
    return " and ".join(text.format(limit) for limit, text in limits if limit is not None)


def _row(key: str, schema: dict[str, Any]) -> str:
    meaning = " ".join(str(schema.get("description", "")).split())
    cells = (f"`{key}`", words(schema), _default(schema.get("default")), meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(value: Any) -> str:
    """As it is written in the file; empty if there is no default."""
    if value is None:
        return ""
    return f"`{value if isinstance(value, str) and value else json.dumps(value)}`"


if __name__ == "__main__":
    print(config_markdown(), end="")
