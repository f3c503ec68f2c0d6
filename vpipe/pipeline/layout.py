"""The layout of a run: blocks to stages, stages to ranks, and what follows from that. Equal on every rank."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from vpipe.communication import BUFFERED_MESSAGES, World
from vpipe.cost.plan_file import recomputed_from_end
from vpipe.cost.policies import POLICIES
from vpipe.errors import PartitionError, ScheduleError, meant
from vpipe.graph import ModelGraph, StageGraph, edges, tied
from vpipe.pipeline.captured import captured
from vpipe.runtime.feed import Fields
from vpipe.schedule import Action, Op, Schedule, ScheduleKind, check, kind_of, lower
from vpipe.schedule.program import shortened
from vpipe.stage.precision import cast, compute_dtype

StateEntry = tuple[str, int, torch.Size, torch.dtype]  # name, the rank that sends it, shape, dtype


@dataclass
class Layout:
    graph: ModelGraph
    partition: tuple[int, ...]
    stage_graphs: tuple[StageGraph, ...]
    schedule: Schedule  # lowered
    policies: tuple[str, ...]  # keep, recompute or swap, for each block
    tied: dict[str, tuple[int, ...]]
    precision: str
    for_count: Callable[[int], Schedule]  # lowered, for an update of fewer minibatches

    @property
    def buffer(self) -> int:
        """Messages of one tensor that may be under way.

        A loss may be sent `lag` updates before another rank makes the update, and be read as many updates later.
        """
        return max(BUFFERED_MESSAGES, self.schedule.buffer, 2 * self.schedule.lag + 3)

    @property
    def compute_dtype(self) -> torch.dtype | None:
        return compute_dtype(self.precision)

    def splits_backward(self, rank: int) -> bool:
        """Whether the rank's program takes input gradients and weight gradients apart."""
        return any(action.op is Op.W for action in islice(self.schedule.program(rank), 10_000))

    def program(self, rank: int, count: int) -> Iterator[Action]:
        """The program of a synchronous update with this many minibatches; the last update may have fewer."""
        schedule = self.schedule if count == self.schedule.minibatches else self.for_count(count)
        return schedule.program(rank)

    def normalise(self, batch: Any) -> Fields:
        """The batch's fields by name, checked, in the compute dtype."""
        dtype = self.compute_dtype
        return {name: cast(tensor, dtype) for name, tensor in self.graph.batch_fields(batch).items()}

    def state_entries(self) -> list[StateEntry]:
        """Everything that a full state holds, in a fixed order, each from the first stage that has it."""
        entries: dict[str, StateEntry] = {}
        for stage in self.stage_graphs:
            owner = self.schedule.placement[stage.index][0]
            for name in (*stage.parameters, *stage.buffers):
                info = self.graph.parameters.get(name) or self.graph.buffers[name]
                entries.setdefault(name, (name, owner, info.shape, info.dtype))
        return list(entries.values())


@dataclass(frozen=True)
class LayoutOptions:
    """How a model is cut, placed and scheduled: arguments of `Pipeline`, nearly all under the same names."""

    stages: int | None
    schedule: str | Schedule
    minibatches: int | None
    update_interval: int | None
    chunks: int | None
    replicas: Sequence[int] | None
    depth: Sequence[int] | None
    placement: Sequence[Sequence[int]] | None
    partition: Sequence[int] | None
    recompute_ratio: Sequence[float] | float
    policies: Sequence[str] | None
    precision: str
    chunked_loss: bool
    compiled: bool


def make_layout(
    model: nn.Module,
    example_batch: Any,
    loss_fn: Callable[..., Tensor] | None,
    world: World,
    options: LayoutOptions,
    device: torch.device,
) -> Layout:
    """Capture the model, cut it, place it, and check that it all fits together before anything runs."""
    graph = captured(model, example_batch, loss_fn, options.precision, options.chunked_loss, world)
    plain, for_count = _schedule(options, world.size)
    partition = _partition(options, graph, plain, device)
    stage_graphs = graph.stages(partition)
    trained = {name for name, info in graph.parameters.items() if info.requires_grad}
    ties = {name: holders for name, holders in tied(stage_graphs).items() if name in trained}
    shared = {stage for holders in ties.values() for stage in holders}
    links = edges(stage_graphs)

    @cache
    def lowered(count: int) -> Schedule:
        shorter = for_count(count)
        return shorter if shorter.lowered else lower(shorter, links, shared)

    layout = Layout(
        graph,
        tuple(partition),
        stage_graphs,
        plain if plain.lowered else lower(plain, links, shared),
        _policies(stage_graphs, options.recompute_ratio, options.policies),
        ties,
        options.precision,
        lowered,
    )
    check(layout.schedule, buffer=layout.buffer)
    return layout


def _schedule(options: LayoutOptions, ranks: int) -> tuple[Schedule, Callable[[int], Schedule]]:
    """The schedule, and how it is made for an update of fewer minibatches."""
    name = options.schedule
    if isinstance(name, Schedule):
        plain, for_count = name, partial(shortened, name)
    else:
        positions = _positions(options.stages, options.replicas, ranks)
        kind = kind_of(name)
        for_count = partial(
            kind.build,
            positions,
            chunks=options.chunks,
            replicas=options.replicas,
            update_interval=options.update_interval,
            depth=options.depth,
            placement=options.placement,
        )
        plain = for_count(_count(kind, options.minibatches, positions))
    if plain.num_ranks != ranks:
        raise ScheduleError(
            f"schedule {plain.name!r} needs {plain.num_ranks} ranks and {ranks} were started: "
            f"use torchrun --nproc-per-node {plain.num_ranks}, or other stages or replicas"
        )
    return plain, for_count


def _partition(
    options: LayoutOptions, graph: ModelGraph, schedule: Schedule, device: torch.device
) -> Sequence[int]:
    partition = options.partition
    if partition is None:
        on_cpu = device.type == "cpu"
        return graph.partition_for_ranks(schedule.placement, compiled=options.compiled, cpu=on_cpu)
    if len(partition) != schedule.num_stages:
        raise PartitionError(
            f"partition {list(partition)} has {len(partition)} stages, schedule {schedule.name!r} "
            f"has {schedule.num_stages}: give one count of blocks for each"
        )
    return partition


def _positions(stages: int | None, replicas: Sequence[int] | None, ranks: int) -> int:
    if replicas is not None:
        if stages not in (None, len(replicas)):
            raise ScheduleError(f"stages is {stages} but replicas {list(replicas)} names {len(replicas)}")
        return len(replicas)
    return ranks if stages is None else stages


def _count(kind: ScheduleKind, minibatches: int | None, positions: int) -> int | None:
    """Minibatches of a program: all of an update's, or as many as the data has."""
    if minibatches is None:
        return kind.default_minibatches(positions)
    if not kind.synchronous:
        raise ScheduleError(
            f"minibatches is {minibatches}, but schedule {kind.name!r} is asynchronous and does not stop after an "
            f"update: give update_interval={minibatches} if an update is to be made of so many"
        )
    return minibatches


def _policies(
    stages: Sequence[StageGraph], ratio: Sequence[float] | float, policies: Sequence[str] | None
) -> tuple[str, ...]:
    """What is done with each block: as given, or as the share of each stage's blocks that is recomputed says."""
    if policies is None:
        return _recomputed(stages, ratio)
    if ratio != 0.0:
        raise PartitionError(
            f"recompute_ratio is {ratio} and policies are given, which say it for each block: leave one of them out"
        )
    blocks = sum(len(stage.blocks) for stage in stages)
    if len(policies) != blocks:
        raise PartitionError(
            f"policies has {len(policies)} entries, the model has {blocks} blocks: give one for each"
        )
    for block, policy in enumerate(policies):
        if policy not in POLICIES:
            raise PartitionError(f"policy of block {block} is {policy!r}: {meant(policy, POLICIES)}")
    return tuple(policies)


def _recomputed(stages: Sequence[StageGraph], ratio: Sequence[float] | float) -> tuple[str, ...]:
    ratios = list(ratio) if isinstance(ratio, Sequence) else [ratio] * len(stages)
    if len(ratios) != len(stages):
        raise PartitionError(
            f"recompute_ratio {ratios} has {len(ratios)} entries, the model has {len(stages)} stages: give one for each"
        )
    for stage, share in enumerate(ratios):
        if not 0 <= share <= 1:
            raise PartitionError(f"recompute_ratio of stage {stage} is {share}: it must lie between 0 and 1")
    return recomputed_from_end([len(stage.blocks) for stage in stages], ratios)
