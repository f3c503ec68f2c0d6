"""The reading of a configuration: YAML, `vpipe.json` and `mp_conf.json`, and one line for each mistake in them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from vpipe.config.code import code_directories
from vpipe.config.contradictions import MODEL_SIZES, TABLE_SAYS
from vpipe.config.derived import minibatches_of_update, model_sizes
from vpipe.config.keys import RunConfig
from vpipe.config.maps import read_maps
from vpipe.config.settings import AUTO, is_path
from vpipe.cost import read_plan
from vpipe.errors import ConfigError
from vpipe.schedule import KINDS, kind_of
from vpipe.system.console import warn
from vpipe.system.files import SMALL_YAML, parse_yaml, read_text, short_repr
from vpipe.system.validation import first_mistake

KEYS = tuple(RunConfig.model_fields)


def read_config(
    path: Path, settings: Mapping[str, Any] | None = None, schedule: str | None = None
) -> RunConfig:
    """The configuration in a file, with what its `vpipe.json` and its `mp_conf.json` say.

    `settings` go before the file's own keys. With another `schedule` than the file's, the file's keys that only its own
    schedule understands are left out.
    """
    values = read_yaml(path)
    if schedule is not None:
        foreign = _not_for(schedule)
        values = {key: value for key, value in values.items() if key not in foreign} | {"schedule": schedule}
    if str(values.get("format", "")).startswith("vpipe "):
        raise ConfigError(
            f"{path}: its format is {short_repr(values['format'])}, not a configuration: give a run's YAML file here; "
            "a profile is given by --profile, a plan as the run's `partition`"
        )
    config = check_values(values | dict(settings or {}), path)
    if isinstance(config.partition, str) and config.partition != AUTO:
        config = with_plan(config, config.file("partition"))
    if config.config_file is not None:
        config = _with_maps(config, config.file("config_file"))
    sizes = model_sizes(config)
    if sizes:
        listed = ", ".join(f"{key} {value}" for key, value in sizes.items())
        config.notes.append(f"from the number of blocks in the partition follow {listed}")
    config = _with(config, sizes)
    return _with(config, minibatches_of_update(config))


def _not_for(schedule: str) -> Collection[str]:
    """The keys that another schedule may have had, and that say nothing of this one, or contradict it."""
    chosen_by = {"sync_mode", "macrobatch", "global_batch_size"}
    if is_path("schedule", schedule):
        return chosen_by | set(TABLE_SAYS)
    kind = kind_of(schedule)
    chosen_by |= {"update_interval", "staleness"} if kind.synchronous else {"minibatches"}
    return chosen_by | {
        key for key, taken in (("chunks", kind.any_chunks), ("depth", kind.any_depth)) if not taken
    }


def _with(config: RunConfig, values: dict[str, Any], place: Path | None = None) -> RunConfig:
    """The configuration with these values too, which a file at `place` has, if not its own."""
    checked = check_values(config.model_dump(exclude_unset=True) | values, place or config.source)
    checked._source, checked._planned = config.source, config.planned
    checked._idle, checked._notes = config.idle, config.notes
    return checked


def with_plan(config: RunConfig, path: Path) -> RunConfig:
    """The plan's values for the keys that the file does not give."""
    plan = read_plan(path)
    planned: dict[str, Any] = {"partition": list(plan.partition), "batch_size": plan.batch_size or None}
    if config.recompute_ratio is None:
        planned["policies"] = list(plan.policies)
    kept = config.model_dump(exclude_unset=True, exclude_none=True, exclude={"partition"})
    if config.schedule == AUTO:
        if not plan.scheduled:
            raise ConfigError(f"{config.source}: schedule is {AUTO!r}, but {path} has none: name a schedule")
        # What only a schedule of the other kind has was for that.
        del kept["schedule"]
        own = KINDS.get(plan.schedule)
        if own is not None:
            kept.pop("staleness" if own.synchronous else "minibatches", None)
            if own.synchronous:
                planned["optimizer"] = config.chosen_optimizer  # of all schedules that were compared
    if "schedule" not in kept and config.sync_mode is None and not config.macrobatch and plan.scheduled:
        planned["schedule"] = plan.schedule
    if plan.schedule == planned.get("schedule", config.chosen_schedule):
        planned |= {key: getattr(plan, key) for key in ("minibatches", "chunks", "update_interval")}
        planned["depth"] = list(plan.depth) or None
    planned["replicas"] = list(plan.replicas) or None
    if config.replicas in (None, planned["replicas"]):
        planned["placement"] = [list(own) for own in plan.placement] or None
    kind = KINDS.get(planned.get("schedule", config.chosen_schedule))
    if kind is None:  # a table says it itself
        planned |= dict.fromkeys(TABLE_SAYS)
    elif not kind.synchronous:
        planned["minibatches"] = None  # of the simulated run
    if sum(plan.replicas) == config.stages and config.replicas is None:
        del kept["stages"]  # as many ranks, but some of them are replicas
    idle = plan.idle and config.replicas is None and sum(plan.replicas) + plan.idle == config.ranks
    if idle:
        kept = {key: value for key, value in kept.items() if key not in ("stages", "module")}
        if config.machines is not None:
            kept["machines"] = config.machines[: -plan.idle]
    checked = check_values({key: v for key, v in planned.items() if v is not None} | kept, config.source)
    checked._planned = (path, plan.fingerprint)
    if idle or (config.machines is None and config.vgpus is None and config.ranks_of_layout is None):
        checked._idle = plan.idle
    if idle:
        checked.notes.append(f"{path} uses {checked.ranks} of {config.ranks} ranks: it is faster so")
    return checked


def _with_maps(config: RunConfig, path: Path) -> RunConfig:
    """The partition, the replicas, the placement and the depth of the maps, which must not contradict the keys."""
    maps = read_maps(path, config.replicas)
    kind = KINDS.get(config.chosen_schedule)
    depth = maps.depth if kind is not None and kind.any_depth else None
    if depth != maps.depth:
        warn(
            f"{path}: stage_to_depth_map is not used: schedule {config.chosen_schedule!r} has a warm-up of its own"
        )
    mapped = {
        "partition": maps.partition,
        "replicas": maps.replicas,
        "depth": depth,
        "placement": maps.placement,
    }
    for key, value in mapped.items():
        own = getattr(config, key)
        if value is not None and own is not None and own != value:
            raise ConfigError(
                f"{config.source}: {key} is {short_repr(own)}, but {path} says {short_repr(value)}: "
                "make the two equal, or leave one out"
            )
    return _with(config, {key: value for key, value in mapped.items() if value is not None}, path)


def resolved_yaml(config: RunConfig) -> str:
    """Every key with the value that it has in this run; it can be read from anywhere."""
    return write_yaml(resolved_values(config))


def write_yaml(values: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)


def resolved_values(config: RunConfig) -> dict[str, Any]:
    """Every key with its value; paths are absolute."""
    values = config.model_dump(
        mode="json", exclude=set() if config.model is None else {"model_type", *MODEL_SIZES}
    )
    for key, value in values.items():
        if is_path(key, value):
            values[key] = str(config.file(key).absolute())
    if config.code:
        values["python_path"] = list(map(str, code_directories(config)))
    return values


def read_yaml(path: Path) -> dict[str, Any]:
    """The keys and values of a YAML file; nothing but plain data is ever made from it."""
    text = read_text(path, most=SMALL_YAML)
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
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{path}: {first_mistake(error, values)}") from None
    config._source = path
    return config


def _kind(value: Any) -> str:
    return {list: "a list", str: "text", int: "a number", float: "a number"}.get(type(value), repr(value))
