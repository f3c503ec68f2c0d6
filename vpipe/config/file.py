"""The reading of a configuration: YAML, `vpipe.json` and `mp_conf.json`, and one line for each mistake in them."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from reprlib import Repr
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from vpipe.config.keys import MODEL_SIZES, RunConfig
from vpipe.config.maps import read_maps
from vpipe.config.settings import AUTO, is_path
from vpipe.cost import read_plan
from vpipe.errors import ConfigError
from vpipe.system.files import parse_yaml, read_text

KEYS = tuple(RunConfig.model_fields)


def read_config(path: Path, settings: Mapping[str, Any] | None = None) -> RunConfig:
    """The configuration in a file, with what its `vpipe.json` and its `mp_conf.json` say.

    `settings` go before the file's own keys.
    """
    values = read_yaml(path) | dict(settings or {})
    config = check_values(values, path)
    config._source = path
    if isinstance(config.partition, str) and config.partition != AUTO:
        config = _with_plan(config, config.path(config.partition))
    if config.config_file is not None:
        config = _with_maps(config, config.path(config.config_file))
    return config


def _with_plan(config: RunConfig, path: Path) -> RunConfig:
    """What the plan says, except where the file says it itself."""
    plan = read_plan(path)
    told: dict[str, Any] = {"partition": list(plan.partition)}
    if config.recompute_ratio is None and config.recompute is not False:
        told["policies"] = list(plan.policies)
    if config.schedule is None and config.sync_mode is None and not config.macrobatch and plan.scheduled:
        told["schedule"] = plan.schedule
    if plan.schedule == told.get("schedule", config.chosen_schedule):
        told |= {key: getattr(plan, key) for key in ("minibatches", "chunks", "update_interval")}
    told["replicas"] = list(plan.replicas) or None
    given = config.model_dump(exclude_unset=True)
    kept = {key: value for key, value in given.items() if key != "partition"}
    if sum(plan.replicas) == config.stages and config.replicas is None:
        del kept["stages"]  # as many ranks, but some of them are replicas
    checked = check_values({key: v for key, v in told.items() if v is not None} | kept, config.source)
    checked._source = config.source
    checked._planned = (path, plan.fingerprint)
    return checked


def _with_maps(config: RunConfig, path: Path) -> RunConfig:
    """The maps say again what other keys say, or say it instead of them."""
    maps = read_maps(path, config.replicas)
    told = {"partition": maps.partition, "replicas": maps.replicas}
    for key, value in told.items():
        own = getattr(config, key)
        if value is not None and own is not None and own != value:
            raise ConfigError(
                f"{config.source}: {key} is {_shown(own)}, but {path} says {_shown(value)}: "
                "make the two equal, or leave one out"
            )
    given = config.model_dump(exclude_unset=True)
    checked = check_values(given | {key: value for key, value in told.items() if value is not None}, path)
    checked._source = config.source
    checked._planned = config.planned
    return checked


def resolved_yaml(config: RunConfig) -> str:
    """Every key with the value that it has in this run; it can be read from anywhere, so paths are absolute."""
    values = config.model_dump(
        mode="json", exclude=set() if config.model is None else {"model_type", *MODEL_SIZES}
    )
    for key, value in values.items():
        if is_path(key, value):
            values[key] = str(config.path(value).absolute())
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def read_yaml(path: Path) -> dict[str, Any]:
    """The keys and values of a YAML file; nothing but plain data is ever made from it."""
    text = read_text(path)
    try:
        values = parse_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {error}; write plain `key: value` lines") from None
    if values is None:
        raise ConfigError(f"{path}: the file is empty: write `key: value` lines, such as `model_type: bert`")
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path}: holds {_kind(values)}, not a mapping: write `key: value` lines, such as `stages: 4`"
        )
    return values


def check_values(values: dict[str, Any], path: Path) -> RunConfig:
    """The configuration of these keys and values, as they stand in the file `path`."""
    for key, value in values.items():
        if key not in KEYS:
            close = get_close_matches(str(key)[:40], KEYS, n=1, cutoff=0.6)
            hint = f"did you mean {close[0]!r}?" if close else f"known keys are {', '.join(KEYS)}"
            raise ConfigError(f"{path}: unknown key {_shown(key)} (its value is {_shown(value)}): {hint}")
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


_REPR = Repr()
_REPR.maxlevel, _REPR.maxlist, _REPR.maxdict, _REPR.maxstring, _REPR.maxlong = 4, 30, 30, 100, 60


def _shown(value: Any) -> str:
    text = _REPR.repr(value)  # in short, however large or deep it is
    return text if len(text) <= 60 else text[:57] + "..."


def _kind(value: Any) -> str:
    return {list: "a list", str: "text", int: "a number", float: "a number"}.get(type(value), repr(value))
