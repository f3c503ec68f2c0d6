"""The pipeline that a configuration describes, as arguments of `Pipeline`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vpipe.config.derived import known_blocks
from vpipe.config.settings import AUTO
from vpipe.errors import ConfigError, PartitionError
from vpipe.schedule import Schedule, kind_of, read_table
from vpipe.schedule.facts import mean_delay
from vpipe.system.files import read_text

if TYPE_CHECKING:
    from vpipe.config.keys import OptimizerGroup, RunConfig
    from vpipe.weights import OptimizerFactory

OLD = 1.0
"""Updates of mean delay, from which on slower moments beside Muon help; with less they cost more than the delay."""
STALE_BETAS = [0.97, 0.99]


def pipeline_arguments(config: RunConfig) -> dict[str, Any]:
    """The arguments that a run and its verification share: partition, schedule, optimizer."""
    arguments: dict[str, Any] = {
        "optimizer": make_optimizer_factory(config),
        "clip_norm": config.clip_norm,
        "seed": config.seed,
        "partition": config.partition,
        "staleness": config.remedies,
        "chunked_loss": config.chunked_loss,
    }
    if config.policies is None:
        arguments["recompute_ratio"] = config.ratio
    else:
        arguments["policies"] = config.policies
    _check_chosen(config)
    if config.chosen_schedule.endswith(".csv"):
        return arguments | {"schedule": build_schedule(config)}
    return arguments | {
        "schedule": config.chosen_schedule,
        "stages": config.positions,
        "minibatches": config.minibatches,
        "update_interval": config.update_interval,
        "chunks": config.chunks,
        "replicas": config.replicas,
        "depth": config.depth,
        "placement": config.placement,
    }


def _check_chosen(config: RunConfig) -> None:
    if config.chosen_schedule == AUTO:
        raise ConfigError(
            f"{config.source}: schedule is {AUTO!r}, which only `vpipe train` chooses, with its plan: run `vpipe plan "
            f"{config.source}` and set partition: plan.json, or name a schedule"
        )


def make_optimizer_factory(config: RunConfig) -> OptimizerFactory:
    """The `optimizer` of a Pipeline, with the configured groups."""
    from vpipe.weights import optimizer_factory, optimizer_groups  # torch comes with it

    def factory(group: OptimizerGroup | None = None) -> OptimizerFactory:
        given = {} if group is None else group.model_dump(exclude_none=True)
        name = given.get("optimizer", config.chosen_optimizer)
        numbers = (given.get(key, getattr(config, key)) for key in ("learning_rate", "weight_decay"))
        settings: dict[str, Any] = {
            "betas": _betas(config),
            "eps": config.eps,
            "momentum": config.momentum,
        }
        if name != config.chosen_optimizer:  # they are for the run's own optimizer
            settings = {}
        return optimizer_factory(name, *numbers, **settings)

    rules = [(group.match, factory(group)) for group in config.optimizer_groups]
    return optimizer_groups(*rules, rest=factory(), place=f"{config.source}: optimizer_groups")


def _betas(config: RunConfig) -> list[float] | None:
    """The configured ones; else those of the AdamW beside Muon that bear old weights, or None: the optimizer's own."""
    may_be_old = config.has_stale_weights and config.chosen_schedule != AUTO
    if config.betas is None and config.chosen_optimizer == "muon" and may_be_old:
        return STALE_BETAS if mean_delay(build_schedule(config)) >= OLD else None
    return config.betas


def check_plan(config: RunConfig, model: str) -> None:
    """Raise if the configuration names a plan for another model than the one with this fingerprint."""
    if config.planned is None:
        return
    path, fingerprint = config.planned
    if fingerprint and fingerprint != model:
        raise ConfigError(
            f"{path}: is a plan for another model: its fingerprint is {fingerprint[:16]!r}, the model in "
            f"{config.source} has {model[:16]!r}: plan again with `vpipe plan {config.source}`"
        )


def check_blocks(config: RunConfig, schedule: Schedule) -> None:
    """Raise if partition or policies do not fit the model, as far as its blocks are known before ranks start."""
    blocks, stages, ratio = known_blocks(config), schedule.num_stages, config.recompute_ratio
    if isinstance(ratio, list) and len(ratio) != stages:
        raise ConfigError(
            f"{config.source}: recompute_ratio is {ratio}, which has {len(ratio)} entries, but schedule "
            f"{schedule.name!r} has {stages} stages: give one for each"
        )
    if blocks is None:
        return
    if config.policies is not None and len(config.policies) != blocks:
        raise ConfigError(
            f"{config.source}: policies has {len(config.policies)} entries, the model has {blocks} blocks: "
            "give one for each"
        )
    counts = config.partition if isinstance(config.partition, list) else None
    if stages > blocks or (counts is not None and sum(counts) != blocks):
        from vpipe.graph.partition import balanced_partition, check_partition  # torch comes with it

        try:
            if counts is not None:
                check_partition(counts, blocks)
            balanced_partition([1] * blocks, stages)
        except PartitionError as error:
            fitting = sum(counts or ()) // 2
            fix = f", or set num_layers: {fitting}" if sum(counts or ()) % 2 and fitting else ""
            raise ConfigError(f"{config.source}: {error}{fix}") from None


def build_schedule(config: RunConfig) -> Schedule:
    """The configured schedule, checked against ranks and partition before any rank starts."""
    name = config.chosen_schedule
    _check_chosen(config)
    if name.endswith(".csv"):
        schedule = read_table(read_text(config.path(name)), name)
        if schedule.num_ranks != config.ranks:
            raise ConfigError(
                f"{config.source}: the table {name!r} is written for {schedule.num_ranks} ranks, but the run has "
                f"{config.ranks}: make the two equal"
            )
        if config.sync_mode is not None and schedule.synchronous != (config.sync_mode == "bsp"):
            way = "synchronous" if schedule.synchronous else "asynchronous"
            raise ConfigError(
                f"{config.source}: sync_mode is {config.sync_mode!r}, but the table {name!r} is {way}: "
                "leave one of the two out"
            )
    else:
        kind = kind_of(name)
        schedule = kind.build(
            config.positions,
            config.minibatches or kind.default_minibatches(config.positions),
            chunks=config.chunks,
            replicas=config.replicas,
            update_interval=config.update_interval,
            depth=config.depth,
            placement=config.placement,
        )
    if config.machines is not None and len(config.machines) != schedule.num_ranks:
        raise ConfigError(
            f"{config.source}: machines names {len(config.machines)} ranks, but schedule {name!r} has "
            f"{schedule.num_ranks}: make the two equal"
        )
    if isinstance(config.partition, list) and len(config.partition) != schedule.num_stages:
        where = "" if config.machines is None else f" on the {len(config.machines)} ranks of `machines`"
        raise ConfigError(
            f"{config.source}: partition is {config.partition}, which has {len(config.partition)} stages, but "
            f"schedule {name!r} has {schedule.num_stages}{where}: give one number of blocks for each"
        )
    return schedule
