"""The keys that contradict each other: no key is accepted that another one overrides in silence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vpipe.config.compress import compression_problems
from vpipe.config.settings import AUTO
from vpipe.schedule import KINDS, guides_schedule

if TYPE_CHECKING:
    from vpipe.config.keys import RunConfig

Contradiction = tuple[str, str]
"""A key, and what is wrong with its value."""

MOST_RANKS = 4096
MOST_SYNTHETIC = 10_000_000
MODEL_SIZES = ("hidden_size", "num_layers", "num_heads", "intermediate_size", "vocab_size", "dropout")
TABLE_SAYS = ("minibatches", "update_interval", "chunks", "replicas", "depth", "placement")
ONE_OF_TWO = "leave one of the two out"


def contradictions(config: RunConfig) -> Iterator[Contradiction]:
    """All of them, in the order of the keys' sections."""
    for section in (_model, _data, _schedule, _memory, _training, _ranks):
        yield from section(config)


def _written(config: RunConfig, key: str) -> bool:
    """Whether the key has another value than its default; a run's own config.yml writes defaults down too."""
    return getattr(config, key) != type(config).model_fields[key].get_default(call_default_factory=True)


def _model(config: RunConfig) -> Iterator[Contradiction]:
    if config.model is not None:
        for key in ("model_type", *MODEL_SIZES):
            if key in config.model_fields_set:
                yield key, f"what `model` names says it: {ONE_OF_TWO}"
    elif config.hidden_size % config.num_heads:
        yield "hidden_size", f"it must be a multiple of num_heads, which is {config.num_heads}"
    if config.python_path and not config.code:
        yield (
            "python_path",
            "no key names a function (`module:function`) that would be looked for there: leave it out",
        )
    if config.prompt and (config.model is not None or config.model_type != "cpm"):
        yield "prompt", "only `model_type: cpm` writes a sentence at its end: leave it out"


def _data(config: RunConfig) -> Iterator[Contradiction]:
    for key in ("data_dir", "tokenizer", "synthetic_data", "data_field", "token_type", "documents"):
        if config.data is not None and _written(config, key):
            yield key, f"the samples come from `data`, {config.data!r}: {ONE_OF_TWO}"
    for key in ("data_dir", "tokenizer", "data_field", "token_type", "prompt"):
        if config.synthetic_data and _written(config, key):
            yield key, f"synthetic_data is true, so no text is read: {ONE_OF_TWO}"
    if config.synthetic_data and config.documents == "padded":
        yield "documents", f"synthetic_data is true, so there are no documents: {ONE_OF_TWO}"
    if config.synthetic_data and (config.max_samples or 0) > MOST_SYNTHETIC:
        yield "max_samples", f"of synthetic data there are {MOST_SYNTHETIC:,} at most"


def _schedule(config: RunConfig) -> Iterator[Contradiction]:
    name = config.chosen_schedule
    kind = KINDS.get(name)  # None: a table
    if name == AUTO:
        if not isinstance(config.partition, str):
            yield "schedule", "it is chosen with the plan: write partition: auto too"
        for key in ("sync_mode", "macrobatch", "update_interval", "global_batch_size"):
            if getattr(config, key) is not None:
                yield key, f"schedule is {AUTO!r}, which chooses it: {ONE_OF_TWO}"
        return
    if config.macrobatch and config.sync_mode == "bsp":
        yield "macrobatch", "it is an asynchronous mode: leave sync_mode 'bsp' out, or macrobatch"
    if kind is None:
        for key in TABLE_SAYS:
            if getattr(config, key) is not None:
                yield key, f"the table {name!r} says it: leave it out"
    meant = guides_schedule(asynchronous=True, macrobatch=True)
    if config.macrobatch is not None and config.macrobatch != (name == meant):
        yield "macrobatch", f"schedule is {name!r}, and macrobatch is the schedule {meant!r}: {ONE_OF_TWO}"
    if kind is None:
        return
    way = "synchronous" if kind.synchronous else "asynchronous"
    if config.sync_mode is not None and kind.synchronous != (config.sync_mode == "bsp"):
        yield "sync_mode", f"schedule {name!r} is {way}: {ONE_OF_TWO}"
    if config.staleness and kind.synchronous:
        yield "staleness", f"schedule {name!r} is synchronous, so no weights are stale: {ONE_OF_TWO}"
    if config.minibatches is not None and not kind.synchronous:
        yield (
            "minibatches",
            f"schedule {name!r} is asynchronous and does not stop after an update: write update_interval for the "
            "minibatches of an update",
        )
    if (
        config.update_interval is not None
        and kind.synchronous
        and config.update_interval != config.minibatches
    ):
        yield "update_interval", f"schedule {name!r} is synchronous: write minibatches for those of an update"


def _memory(config: RunConfig) -> Iterator[Contradiction]:
    ratio, policies = config.recompute_ratio, config.policies
    if policies is not None and ratio is not None:
        yield "recompute_ratio", f"`policies` says it for each block: {ONE_OF_TWO}"
    if config.recompute is None:
        return
    shares = [] if ratio is None else ratio if isinstance(ratio, list) else [ratio]
    shares = shares if policies is None else [float(policy == "recompute") for policy in policies]
    if any(share != config.recompute for share in shares):
        key = "recompute_ratio" if policies is None else "policies"
        what = "everything" if config.recompute else "nothing"
        yield "recompute", f"{what} is recomputed then, but {key} (or the plan) says otherwise: {ONE_OF_TWO}"


def _training(config: RunConfig) -> Iterator[Contradiction]:
    skipped, updates = config.nonfinite_limit
    if skipped > updates:
        yield "nonfinite_limit", f"of {updates} updates {skipped} cannot be skipped"
    if _written(config, "nonfinite_limit") and config.on_nonfinite != "skip":
        yield "nonfinite_limit", "no update is skipped: write on_nonfinite: skip, or leave it out"
    if config.loss_scale is not None and config.precision != "fp16":
        yield "loss_scale", f"precision is {config.precision!r}, and only fp16 needs one: {ONE_OF_TWO}"
    if config.max_updates is not None and config.warmup_updates > config.max_updates:
        yield "warmup_updates", f"the run has only {config.max_updates} updates (max_updates)"


def _ranks(config: RunConfig) -> Iterator[Contradiction]:
    replicas, stages = config.replicas, config.stages
    if replicas is not None and sum(replicas) > MOST_RANKS:
        yield "replicas", f"they add up to {sum(replicas)} ranks: give {MOST_RANKS} at most"
    if stages is not None and replicas is not None and len(replicas) != stages:
        yield "replicas", f"give one number for each of the {stages} stages"
    if config.machines is not None:
        yield from _machines(config, len(config.machines))
    yield from compression_problems(config)
    if None not in (config.vgpus, config.ranks_of_layout) and config.vgpus != config.ranks_of_layout:
        yield (
            "module",
            f"stages and replicas make {config.ranks_of_layout} ranks: make the two equal, or leave one out",
        )


def _machines(config: RunConfig, count: int) -> Iterator[Contradiction]:
    if config.vgpus not in (None, count):
        yield "module", f"`machines` names {count} ranks: make the two equal, or leave one out"
    if config.replicas is not None and sum(config.replicas) != count:
        yield "replicas", f"they add up to {sum(config.replicas)}, but `machines` names {count} ranks"
    if config.replicas is None and config.stages not in (None, count):
        yield "stages", f"`machines` names {count} ranks: make the two equal, or give replicas"
