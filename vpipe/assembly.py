"""The making of a rank's runtime from the layout: its stages, their weights, and what connects them."""

import torch
from torch import nn

from vpipe.communication import CommunicationHandler
from vpipe.cost.plan_file import RECOMPUTE, SWAP
from vpipe.errors import VPipeError
from vpipe.graph.compiled import check_compiler
from vpipe.layout import Layout
from vpipe.runtime import GradientExchange, Losses, LossScale, Stage, StageRuntime, Updates
from vpipe.weights import OptimizerFactory, OptimizerWithWeightStashing, SchedulerFactory


def assemble(
    layout: Layout,
    model: nn.Module,
    handler: CommunicationHandler,
    optimizer: OptimizerFactory,
    lr_scheduler: SchedulerFactory | None,
    *,
    clip_norm: float | None,
    on_nonfinite: str | None,
    compile: str | None,
    seed: int,
) -> StageRuntime:
    """Build what this rank holds: its own stages only. `compile` names a backend of torch.compile."""
    if compile is not None:
        _check_compile(layout, compile, handler.device)
    schedule = layout.schedule
    split = layout.splits_backward(handler.rank)
    stages = {
        index: _make_stage(
            layout,
            index,
            model,
            optimizer,
            lr_scheduler,
            device=handler.device,
            split=split,
            compile=compile,
            seed=seed,
        )
        for index in schedule.stages_of(handler.rank)
    }
    loss_scale = LossScale.for_precision(layout.precision)
    exchange = GradientExchange(handler, schedule.placement, stages, layout.tied, layout.lag, loss_scale)
    updates = Updates(
        handler,
        exchange,
        stages,
        synchronous=schedule.synchronous,
        interval=schedule.update_interval,
        clip_norm=clip_norm,
        loss_scale=loss_scale,
        on_nonfinite=on_nonfinite,
    )
    # Updates that a host may be ahead of its GPU.
    late = 0 if handler.device.type == "cpu" else layout.lag + 1
    losses = Losses(handler, schedule.placement[-1], late, stop_unless_finite=on_nonfinite == "stop")
    return StageRuntime(
        layout.graph, layout.stage_graphs, stages, schedule, handler, exchange, updates, losses
    )


def _check_compile(layout: Layout, backend: str, device: torch.device) -> None:
    if layout.graph.trace.boundaries is not None:
        raise VPipeError(
            "compile is asked for, but the model could not be captured and its children run as they stand, which "
            "nothing can compile: leave compile out, or wrap the children in torch.compile yourself"
        )
    check_compiler(backend, device)


def _make_stage(
    layout: Layout,
    index: int,
    model: nn.Module,
    optimizer: OptimizerFactory,
    lr_scheduler: SchedulerFactory | None,
    *,
    device: torch.device,
    split: bool,
    compile: str | None,
    seed: int,
) -> Stage:
    graph = layout.stage_graphs[index]
    module = graph.build(
        model,
        recompute=layout.blocks_to(RECOMPUTE, index),
        swap=layout.blocks_to(SWAP, index),
        split=split,
        compile=compile,
        device=device,
        seed=seed,
    )
    dtype = layout.compute_dtype
    originals = {name: p.detach() for name, p in module.parameters_by_name.items()}
    if dtype is not None:
        for tensor in (*module.parameters_by_name.values(), *module.buffers_by_name.values()):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
    weights = OptimizerWithWeightStashing(
        module.parameters_by_name,
        optimizer,
        tied=[name for name, holders in layout.tied.items() if index in holders],
        master_values=originals,
        lr_scheduler=lr_scheduler,
        update_interval=layout.schedule.update_interval,
    )
    evaluation = graph.build(module, training=False)
    return Stage(graph, module, evaluation, weights, seed)
