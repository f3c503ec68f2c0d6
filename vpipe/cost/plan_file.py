"""The plan and its JSON file: partition, memory policy of each block, schedule, replicas.

The guides' file of two keys is a plan: {"partition": [12, 13, 13, 11], "recompute_ratio": [0.3, 0, 0, 0]}.
docs/formats.md describes the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from math import ceil, nextafter
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PlainValidator

from vpipe.cost.fields import FileObject, Unit, finite, read_object
from vpipe.cost.policies import KEEP, POLICIES, RECOMPUTE
from vpipe.errors import ConfigError, meant
from vpipe.schedule import KINDS, Schedule, read_table
from vpipe.schedule.kind import MOST_DEPTH
from vpipe.system.files import check_path, read_text, short_repr, write_json

MOST_BLOCKS = 1_000_000
"""More than any model has: a typing error must not fill the memory."""


def _policy(name: Any) -> Any:
    if not isinstance(name, str) or name not in POLICIES:
        raise ValueError(f"one of {', '.join(POLICIES)}")
    return name


def check_schedule(name: str) -> str:
    if name not in KINDS and not name.endswith(".csv"):
        raise ValueError(f"the path of a .csv file, or the name of a schedule: {meant(name, KINDS)}")
    return check_path(name)


def _figure(value: Any) -> Any:
    if finite(value) is None and not isinstance(value, list):
        raise ValueError("a number or a list")
    return value


Policies = Annotated[tuple[Annotated[str, PlainValidator(_policy)], ...], Field(min_length=1)]
ScheduleName = Annotated[str, AfterValidator(check_schedule)]
Ranks = Annotated[tuple[Annotated[int, Unit("a rank")], ...], Field(min_length=1)]
Share = Annotated[float, Unit("a number", most=1)]


@dataclass(frozen=True)
class Plan(FileObject):
    partition: Annotated[tuple[Annotated[int, Unit("blocks of a stage", least=1)], ...], Field(min_length=1)]
    policies: Policies
    """For each block."""
    schedule: ScheduleName = "vpipe"
    replicas: Annotated[
        tuple[Annotated[int, Unit("ranks of a pipeline position", least=1)], ...], Field(min_length=1)
    ] = ()
    """Empty: one each."""
    minibatches: Annotated[int, Unit("minibatches of a run or an update", least=1)] | None = None
    chunks: Annotated[int, Unit("stages on each rank", least=1)] | None = None
    update_interval: Annotated[int, Unit("minibatches of an update", least=1)] | None = None
    depth: Annotated[
        tuple[Annotated[int, Unit("forwards ahead", most=MOST_DEPTH)], ...], Field(min_length=1)
    ] = ()
    """Of each stage, before its first pair of forward and backward; empty: as many as the schedule has by itself."""
    batch_size: Annotated[int, Unit("samples of a minibatch")] = 0
    """0: as the profile's."""
    fingerprint: str = ""
    """That of the model; empty if it is unknown."""
    prediction: dict[str, Annotated[Any, PlainValidator(_figure)]] = field(default_factory=dict)
    """Figures that were predicted when the plan was made: numbers or lists."""
    placement: Annotated[tuple[Ranks, ...], Field(min_length=1)] = ()
    """The ranks of each pipeline position, in the order of their first minibatches; empty: numbered position by
    position."""
    idle: Annotated[int, Unit("idle ranks")] = 0
    """The last ranks of the run, which have no stage: the plan is faster without them."""
    scheduled: bool = field(default=True, compare=False, metadata={"in_file": False})
    """Whether it says which schedule it is for; the guides' file of two keys does not."""
    format: Literal["vpipe plan 1"] = "vpipe plan 1"

    def stage_policies(self) -> list[tuple[str, ...]]:
        ends = list(accumulate(self.partition))
        return [self.policies[end - count : end] for count, end in zip(self.partition, ends, strict=True)]

    def ratios(self) -> list[float] | None:
        """For each stage the share of its blocks, from its end, that is recomputed; None: no such shape."""
        ratios = []
        for policies in self.stage_policies():
            count, blocks = policies.count(RECOMPUTE), len(policies)
            if policies != (KEEP,) * (blocks - count) + (RECOMPUTE,) * count:
                return None
            short = ceil(10_000 * count / blocks) / 10_000
            # A share may be rounded to less than a whole number of blocks: 1 / 49 * 49 is less than 1.
            ratios.append(short if int(short * blocks) == count else nextafter(count / blocks, 1))
        return ratios


def recomputed_from_end(partition: Sequence[int], ratios: Sequence[float]) -> tuple[str, ...]:
    """The policies that a share for each stage, counted from its end, stands for: the guides' `int(fraction * n)`."""
    policies: list[str] = []
    for count, share in zip(partition, ratios, strict=True):
        recomputed = int(share * count)
        policies += [KEEP] * (count - recomputed) + [RECOMPUTE] * recomputed
    return tuple(policies)


@dataclass(frozen=True)
class _PlanFile(Plan):
    """A plan as the file has it: policies may be given by `recompute_ratio`, and the schedule may be left out."""

    policies: Policies = ()
    schedule: ScheduleName = ""
    recompute_ratio: Share | Annotated[tuple[Share, ...], Field(min_length=1)] = ()
    """For each stage, or one for all: the share of its blocks, counted from its end, that is recomputed."""


def read_plan(path: Path) -> Plan:
    file = read_object(_PlanFile, path)
    if sum(file.partition) > MOST_BLOCKS:
        raise ConfigError(
            f"{path}: partition is {short_repr(list(file.partition))}: expected {MOST_BLOCKS:,} blocks at most"
        )
    if file.idle and not file.replicas:
        raise ConfigError(
            f"{path}: idle is {file.idle}, but there are no replicas, which say how many ranks are not idle: give one "
            f"number for each position of the pipeline, such as {[1] * min(4, len(file.partition))}"
        )
    values = {entry.name: getattr(file, entry.name) for entry in fields(Plan)}
    return Plan(
        **values
        | {
            "policies": _policies(file, path),
            "schedule": file.schedule or Plan.schedule,
            "scheduled": bool(file.schedule),
        }
    )


def write_plan(plan: Plan, path: Path) -> None:
    """The guides' keys come first: `recompute_ratio` only where the policies are of its shape."""
    ratios = plan.ratios()
    values = {
        "partition": list(plan.partition),
        "recompute_ratio": ratios,
        "format": plan.format,
        "policies": list(plan.policies),
        "schedule": plan.schedule,
        "replicas": list(plan.replicas) or None,
        "placement": [list(own) for own in plan.placement] or None,
        "idle": plan.idle or None,
        "minibatches": plan.minibatches,
        "chunks": plan.chunks,
        "update_interval": plan.update_interval,
        "depth": list(plan.depth) or None,
        "batch_size": plan.batch_size or None,
        "fingerprint": plan.fingerprint or None,
        "prediction": plan.prediction or None,
    }
    write_json(path, {key: value for key, value in values.items() if value is not None})


def named_or_table(written: str, directory: Path) -> str | Schedule:
    """A schedule's name as it is; what ends with .csv is read as a table, from a path relative to `directory`."""
    if not written.endswith(".csv"):
        return written
    path = (directory / written).absolute()
    return read_table(read_text(path), str(path))


def _policies(file: _PlanFile, path: Path) -> tuple[str, ...]:
    """Of each block, as `policies` or `recompute_ratio` say it; where both are given they must agree."""
    blocks, ratios = sum(file.partition), file.recompute_ratio
    if file.policies and len(file.policies) != blocks:
        raise ConfigError(
            f"{path}: policies has {len(file.policies)} entries, but the partition holds {blocks} blocks: "
            "give one for each"
        )
    if ratios == ():
        return file.policies or (KEEP,) * blocks
    if not isinstance(ratios, tuple):
        ratios = (ratios,) * len(file.partition)
    if len(ratios) != len(file.partition):
        raise ConfigError(
            f"{path}: recompute_ratio has {len(ratios)} entries, but the partition has {len(file.partition)} "
            "stages: give one for each"
        )
    policies = recomputed_from_end(file.partition, ratios)
    # Older files have shares that are rounded to four digits, perhaps down.
    near = recomputed_from_end(file.partition, [min(1, share + 1e-4) for share in ratios])
    if file.policies and file.policies not in (policies, near):
        raise ConfigError(
            f"{path}: recompute_ratio is {short_repr(list(ratios))}, but the policies say otherwise: "
            "remove one of the two"
        )
    return file.policies or policies
