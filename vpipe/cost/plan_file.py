"""The plan as a JSON file: where the blocks lie, what is kept of each, and how it is all run.

The guides' file of two keys is a plan: {"partition": [12, 13, 13, 11], "recompute_ratio": [0.3, 0, 0, 0]}.
docs/formats.md describes the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from vpipe.cost.json_fields import Fields, finite, shown
from vpipe.cost.policies import KEEP, POLICIES, RECOMPUTE
from vpipe.errors import ConfigError
from vpipe.schedule import NAMES
from vpipe.system.files import read_json, write_json

FORMAT = "vpipe plan 1"
KEYS = (
    "format",
    "partition",
    "recompute_ratio",
    "policies",
    "schedule",
    "replicas",
    "minibatches",
    "chunks",
    "update_interval",
    "batch_size",
    "fingerprint",
    "prediction",
)
MOST_BLOCKS = 1_000_000
"""More than any model has: what follows from a slip of the pen must not fill the memory."""
EXAMPLE = '{"partition": [12, 13], "recompute_ratio": [0.3, 0]}'


@dataclass(frozen=True)
class Plan:
    partition: tuple[int, ...]
    """Blocks of each stage."""
    policies: tuple[str, ...]
    """keep, recompute or swap, for each block."""
    schedule: str = "vpipe"
    replicas: tuple[int, ...] = ()
    """Ranks of each pipeline position; empty: one each."""
    minibatches: int | None = None
    chunks: int | None = None
    update_interval: int | None = None
    batch_size: int = 0
    """Samples of a minibatch; 0: as the profile's."""
    fingerprint: str = ""
    """That of the model; empty if it is unknown."""
    prediction: dict[str, float | list[Any]] = field(default_factory=dict)
    scheduled: bool = field(default=True, compare=False)
    """Whether it says which schedule it is for; the guides' file of two keys does not."""

    def stage_policies(self) -> list[tuple[str, ...]]:
        ends = list(accumulate(self.partition))
        return [self.policies[end - count : end] for count, end in zip(self.partition, ends, strict=True)]

    def recompute_ratio(self) -> list[float] | None:
        """For each stage the share of its blocks, from its end, that is recomputed; None: no such shape."""
        ratios = []
        for policies in self.stage_policies():
            count = policies.count(RECOMPUTE)
            if policies != (KEEP,) * (len(policies) - count) + (RECOMPUTE,) * count:
                return None
            share = count / len(policies)
            short = round(share, 4)
            ratios.append(short if round(short * len(policies)) == count else share)
        return ratios


def recomputed_from_end(partition: Sequence[int], ratios: Sequence[float]) -> tuple[str, ...]:
    """The policies that a share for each stage, counted from its end, stands for."""
    policies: list[str] = []
    for count, share in zip(partition, ratios, strict=True):
        recomputed = round(share * count)
        policies += [KEEP] * (count - recomputed) + [RECOMPUTE] * recomputed
    return tuple(policies)


def read_plan(path: Path) -> Plan:
    fields = Fields(read_json(path), str(path), KEYS, EXAMPLE)
    if fields.text("format", FORMAT) != FORMAT:
        raise fields.fault("format", f"{FORMAT!r}, or left out")
    partition = _counts(fields, "partition", "the number of blocks of each stage, such as [12, 13]")
    if sum(partition) > MOST_BLOCKS:
        raise fields.fault("partition", f"the blocks of a model, which has {MOST_BLOCKS:,} at most")
    schedule = fields.text("schedule", "vpipe")
    if schedule not in NAMES:
        raise fields.fault("schedule", f"one of {', '.join(NAMES)}")
    replicas: tuple[int, ...] = ()
    if "replicas" in fields:
        replicas = _counts(
            fields, "replicas", "the number of ranks of each pipeline position, such as [2, 1]"
        )
    return Plan(
        partition=partition,
        policies=_policies(fields, partition),
        schedule=schedule,
        replicas=replicas,
        minibatches=fields.optional_count("minibatches", "minibatches of a run or an update"),
        chunks=fields.optional_count("chunks", "stages on each rank"),
        update_interval=fields.optional_count("update_interval", "minibatches of an update"),
        batch_size=fields.count("batch_size", "samples of a minibatch", default=0),
        fingerprint=fields.text("fingerprint", ""),
        prediction=_prediction(fields),
        scheduled="schedule" in fields,
    )


def write_plan(plan: Plan, path: Path) -> None:
    """The guides' keys come first: `recompute_ratio` only where the policies are of its shape."""
    ratios = plan.recompute_ratio()
    values = {
        "partition": list(plan.partition),
        "recompute_ratio": ratios,
        "format": FORMAT,
        "policies": list(plan.policies),
        "schedule": plan.schedule,
        "replicas": list(plan.replicas) or None,
        "minibatches": plan.minibatches,
        "chunks": plan.chunks,
        "update_interval": plan.update_interval,
        "batch_size": plan.batch_size or None,
        "fingerprint": plan.fingerprint or None,
        "prediction": plan.prediction or None,
    }
    write_json(path, {key: value for key, value in values.items() if value is not None})


def _counts(fields: Fields, key: str, expected: str) -> tuple[int, ...]:
    counts = fields.items(key, expected)
    for entry, count in enumerate(counts):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(
                f"{fields.place}: {key}, entry {entry} is {shown(count)}: it must be a whole number, 1 or more"
            )
    return tuple(counts)


def _policies(fields: Fields, partition: tuple[int, ...]) -> tuple[str, ...]:
    blocks = sum(partition)
    ratios = _ratios(fields, partition) if "recompute_ratio" in fields else None
    if "policies" not in fields:
        return (KEEP,) * blocks if ratios is None else recomputed_from_end(partition, ratios)
    policies = fields.items("policies", f"{', '.join(POLICIES)} for each block")
    if len(policies) != blocks:
        raise ConfigError(
            f"{fields.place}: policies has {len(policies)} entries, but the partition holds {blocks} blocks: "
            "give one for each"
        )
    for block, policy in enumerate(policies):
        if policy not in POLICIES:
            raise ConfigError(
                f"{fields.place}: policies, block {block} is {shown(policy)}: "
                f"it must be one of {', '.join(POLICIES)}"
            )
    if ratios is not None and recomputed_from_end(partition, ratios) != tuple(policies):
        raise ConfigError(
            f"{fields.place}: recompute_ratio is {shown(ratios)}, but the policies say otherwise: "
            "remove one of the two"
        )
    return tuple(policies)


def _ratios(fields: Fields, partition: tuple[int, ...]) -> list[float]:
    """One for each stage; a single number is that of all stages."""
    value = fields.values["recompute_ratio"]
    ratios = value if isinstance(value, list) else [value] * len(partition)
    if len(ratios) != len(partition):
        raise ConfigError(
            f"{fields.place}: recompute_ratio {shown(ratios)} has {len(ratios)} entries, the partition "
            f"{len(partition)} stages: give one for each"
        )
    for stage, ratio in enumerate(ratios):
        share = finite(ratio)
        if share is None or not 0 <= share <= 1:
            raise ConfigError(
                f"{fields.place}: recompute_ratio of stage {stage} is {shown(ratio)}: "
                "it must be a number from 0 to 1"
            )
    return ratios


def _prediction(fields: Fields) -> dict[str, float | list[Any]]:
    prediction = fields.values.get("prediction", {})
    if not isinstance(prediction, dict):
        raise fields.fault("prediction", "an object of figures, as `vpipe plan` writes it, or left out")
    for key, value in prediction.items():
        if finite(value) is None and not isinstance(value, list):
            raise ConfigError(
                f"{fields.place}: prediction, {shown(key)} is {shown(value)}: it must be a number or a list"
            )
    return prediction
