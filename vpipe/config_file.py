"""The reading of a configuration: YAML and `vpipe.json`, and one line for each mistake in them."""

from __future__ import annotations

import json
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from vpipe.config import RunConfig
from vpipe.errors import ConfigError

KEYS = tuple(RunConfig.model_fields)
PLAN_KEYS = ("partition", "recompute_ratio")


def read_config(path: Path) -> RunConfig:
    """The configuration in a file, with the partition that its `vpipe.json` names."""
    values = read_yaml(path)
    config = check_values(values, path)
    config._source = path
    if not isinstance(config.partition, str):
        return config
    plan_path = config.path(config.partition)
    plan = read_plan(plan_path)
    checked = check_values({key: plan[key] for key in PLAN_KEYS if key in plan}, plan_path)
    ratio = checked.recompute_ratio if config.recompute_ratio is None else config.recompute_ratio
    return config.model_copy(update={"partition": checked.partition, "recompute_ratio": ratio})


def read_yaml(path: Path) -> dict[str, Any]:
    """The keys and values of a YAML file; nothing but plain data is ever made from it."""
    text = read_text(path)
    try:
        values = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        problem = " ".join((error.problem or "it is not YAML").split())
        raise ConfigError(f"{path}{line}: {problem}; write plain `key: value` lines") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        problem = " ".join(str(error).split())
        raise ConfigError(f"{path}: cannot be read as YAML: {problem[:200]}") from None
    if values is None:
        raise ConfigError(f"{path}: the file is empty: write `key: value` lines, such as `model_type: bert`")
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path}: holds {_kind(values)}, not a mapping: write `key: value` lines, such as `stages: 4`"
        )
    return values


def read_plan(path: Path) -> dict[str, Any]:
    """A `vpipe.json`: at least its partition."""
    text = read_text(path)
    try:
        plan = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(plan, dict) or not isinstance(plan.get("partition"), list):
        raise ConfigError(
            f'{path}: has no list "partition": write {{"partition": [12, 13], "recompute_ratio": [0.3, 0]}}'
        )
    return plan


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not a text file in UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None


def check_values(values: dict[str, Any], path: Path) -> RunConfig:
    """The configuration of these keys and values, as they stand in the file `path`."""
    for key, value in values.items():
        if key not in KEYS:
            close = get_close_matches(str(key), KEYS, n=1, cutoff=0.6)
            hint = f"did you mean {close[0]!r}?" if close else f"known keys are {', '.join(KEYS)}"
            raise ConfigError(f"{path}: unknown key {key!r} (its value is {_shown(value)}): {hint}")
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{path}: {_describe(error, values)}") from None


def _describe(error: ValidationError, values: dict[str, Any]) -> str:
    """The first mistake in one line: key, value, what was expected."""
    first = error.errors()[0]
    if first["type"] == "conflict":
        key, problem = first["ctx"]["key"], first["ctx"]["problem"]
        return f"{key} is {_shown(values.get(key, RunConfig.model_fields[key].default))}: {problem}"
    key = str(first["loc"][0])
    # A key that may be of several types has an error for each of them; one inside a list tells the most.
    mistakes = [e for e in error.errors() if str(e["loc"][0]) == key]
    inside = [e for e in mistakes if _entry(e) is not None]
    expected = list(dict.fromkeys(_expected(e) for e in inside or mistakes))
    place = f", entry {_entry(inside[0])}" if inside else ""
    return f"{key} is {_shown(values[key])}{place}: expected {' or '.join(expected)}"


def _entry(error: ErrorDetails) -> int | None:
    """The place in a list where the mistake is."""
    return next((part for part in error["loc"] if isinstance(part, int)), None)


_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "string_too_short": "some text",
    "too_short": "a list with something in it",
    "finite_number": "a number that is not infinite",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "{ge:g} or more",
    "less_than": "less than {lt:g}",
    "less_than_equal": "{le:g} or less",
    "string_pattern_mismatch": "text such as 'vgpus=4'",
    "literal_error": "{expected}",
    "value_error": "{error}",
}


def _expected(error: ErrorDetails) -> str:
    template = _EXPECTED.get(error["type"])
    return error["msg"] if template is None else template.format(**error.get("ctx", {}))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _kind(value: Any) -> str:
    return {list: "a list", str: "text", int: "a number", float: "a number"}.get(type(value), repr(value))
