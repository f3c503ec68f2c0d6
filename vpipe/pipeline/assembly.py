"""The making of a rank's runtime from the layout: its stages, their weights, and what connects them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import torch
from torch import nn

from vpipe.communication import CommunicationHandler
from vpipe.communication.compression import LinkCompression
from vpipe.errors import VPipeError
from vpipe.pipeline.layout import Layout
from vpipe.runtime import GradientExchange, Losses, StageRuntime, Updates
from vpipe.runtime.routes import Routes
from vpipe.schedule import Schedule
from vpipe.schedule.facts import holding
from vpipe.schedule.staleness import Staleness
from vpipe.stage import Stage, StageModule
from vpipe.stage.compiled import check_compiler
from vpipe.stage.graph_pool import GraphPool
from vpipe.stage.precision import LossScale, cast_module
from vpipe.system.device import AUTO_GRAPHS, check_cuda_graphs
from vpipe.weights import OptimizerFactory, OptimizerWithWeightStashing, SchedulerFactory

ROUNDS = 64
"""Actions of a program for each rank, after which a pipeline is as full as it gets."""


@dataclass(frozen=True)
class TrainingOptions:
    """How the stages compute and learn: arguments of `Pipeline`, under the same names."""

    optimizer: OptimizerFactory
    lr_scheduler: SchedulerFactory | None
    compile: bool | str
    cuda_graphs: bool | str
    clip_norm: float | None
    on_nonfinite: str | None
    nonfinite_limit: tuple[int, int]
    staleness: Staleness
    loss_scale: float | None
    compress: LinkCompression
    seed: int

    def __post_init__(self) -> None:
        if self.on_nonfinite not in (None, "stop", "skip"):
            raise VPipeError(f"unknown on_nonfinite {self.on_nonfinite!r}: choose stop, skip or None")
        skipped, updates = self.nonfinite_limit
        if not 1 <= skipped <= updates:
            raise VPipeError(
                f"nonfinite_limit is {self.nonfinite_limit}: give two numbers, such as (10, 100) for 10 of 100 updates"
            )
        if self.loss_scale is not None and not 0 < self.loss_scale < math.inf:
            raise VPipeError(f"loss_scale is {self.loss_scale}: give a number above 0, such as 65536")

    @property
    def compiler(self) -> str | None:
        """The backend of torch.compile that compiles the blocks, if any does."""
        return "inductor" if self.compile is True else self.compile or None


def assemble(
    layout: Layout,
    model: nn.Module,
    handler: CommunicationHandler,
    options: TrainingOptions,
    take_requests: Callable[[], int],
) -> StageRuntime:
    """Build what this rank holds: its own stages only."""
    if options.compiler is not None:
        fix = "leave compile out, or wrap the children in torch.compile yourself"
        _check_captured(layout, "compile is", f"nothing can compile them; {fix}")
        check_compiler(options.compiler, handler.device)
    check_cuda_graphs(options.cuda_graphs, handler.device)
    if options.cuda_graphs is True:
        lost = "what they do differently from minibatch to minibatch would be lost"
        _check_captured(layout, "cuda_graphs are", f"{lost}; leave cuda_graphs out")
    schedule = layout.schedule
    split = layout.splits_backward(handler.rank)
    stages = {
        index: _make_stage(layout, index, model, options, handler.device, rank=handler.rank, split=split)
        for index in schedule.stages_of(handler.rank)
    }
    loss_scale = LossScale.for_precision(layout.precision, options.loss_scale)
    remedies = options.staleness
    split = remedies.split_tied and not schedule.synchronous
    exchange = GradientExchange(
        handler,
        schedule.placement,
        stages,
        layout.tied,
        schedule.lag,
        loss_scale,
        split_from=remedies.async_after if split else None,
    )
    updates = Updates(
        handler,
        exchange,
        stages,
        synchronous=schedule.synchronous,
        interval=schedule.update_interval,
        clip_norm=options.clip_norm,
        loss_scale=loss_scale,
        on_nonfinite=options.on_nonfinite,
        nonfinite_limit=options.nonfinite_limit,
    )
    # Updates that a host may be ahead of its GPU.
    late = 0 if handler.device.type == "cpu" else schedule.lag + 1
    stops = options.on_nonfinite == "stop"
    losses = Losses(handler, schedule.placement[-1], late, take_requests, stop_unless_finite=stops)
    routes = Routes(layout.graph, layout.stage_graphs, schedule, handler.rank)
    return StageRuntime(stages, routes, handler, exchange, updates, losses)


def _check_captured(layout: Layout, option: str, otherwise: str) -> None:
    if layout.graph.trace.boundaries is not None:
        raise VPipeError(
            f"{option} requested, but the model could not be captured and its children run eagerly: {otherwise}"
        )


def _make_stage(
    layout: Layout,
    index: int,
    model: nn.Module,
    options: TrainingOptions,
    device: torch.device,
    *,
    rank: int,
    split: bool,
) -> Stage:
    graph = layout.stage_graphs[index]
    module = StageModule(
        graph,
        model,
        policies={block: layout.policies[block] for block in graph.blocks},
        split=split,
        compile=options.compiler,
        device=device,
        seed=options.seed,
    )
    originals = cast_module(module, layout.compute_dtype)
    weights = OptimizerWithWeightStashing(
        module.parameters_by_name,
        options.optimizer,
        tied=[name for name, holders in layout.tied.items() if index in holders],
        master_values=originals,
        lr_scheduler=options.lr_scheduler,
        versions=_versions(layout.schedule, rank, index),
        model_names=[name for name, p in model.named_parameters() if p.requires_grad],
        predict=options.staleness.predict and not layout.schedule.synchronous,
    )
    with_output = StageModule(graph, module, training=False, keep_output=True)
    in_pieces = graph.is_criterion and graph.trace.heads
    evaluation = StageModule(graph, module, training=False) if in_pieces else with_output
    # Swapping copies on streams of its own at changing times, which no CUDA graph can hold.
    replayed, auto = options.cuda_graphs and not module.swaps, options.cuda_graphs == AUTO_GRAPHS
    if auto:
        replayed = replayed and _may_replay(layout, device)
    graph_pool = GraphPool(module, weights, options.seed, auto=auto) if replayed else None
    return Stage(graph, module, evaluation, with_output, weights, options.seed, graph_pool)


def _may_replay(layout: Layout, device: torch.device) -> bool:
    return device.type == "cuda" and layout.graph.trace.boundaries is None


def _versions(schedule: Schedule, rank: int, stage: int) -> int:
    """The most of the weights that a rank will hold of a stage: the first rounds of its program tell."""
    begin = islice(schedule.program(rank), ROUNDS * schedule.filling)
    return holding(action for action in begin if action.stage == stage).versions
