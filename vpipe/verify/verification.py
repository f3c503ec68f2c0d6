"""Verification that a pipeline trains a user's model as the plain model is trained.

Both run in this process: the pipeline with a thread for each rank, the reference without any pipeline.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from vpipe.config.arguments import pipeline_arguments
from vpipe.errors import VPipeError, meant
from vpipe.pipeline import Pipeline
from vpipe.pipeline.layout import Layout
from vpipe.pipeline.loss_weight import LossWeight, loss_weigher
from vpipe.pipeline.threads import run_ranks
from vpipe.schedule import Schedule
from vpipe.schedule.staleness import Remedy, Staleness, read_staleness
from vpipe.stage import Stage
from vpipe.stage.precision import cast
from vpipe.system.console import Report, unreported
from vpipe.system.device import choose_device
from vpipe.train.workload import build_workload, configured_loss_weight
from vpipe.verify.comparison import (
    Difference,
    StageTensor,
    compare_gradients,
    compare_losses,
    compare_weights,
    rounding_alone,
)
from vpipe.verify.eager import check_runs
from vpipe.verify.reference import Recipe, Trained, train_asynchronously, train_synchronously, versions_read
from vpipe.weights import OptimizerFactory

if TYPE_CHECKING:
    from vpipe.communication import InProcessWorld
    from vpipe.config import RunConfig

BOUNDS = {"float64": 1e-9, "float32": 1e-5}
"""The largest relative difference that rounding explains."""
UPDATES = 5
TIMEOUT = 3600.0
"""Seconds that a rank waits for another: a stage of a large model takes long on a CPU."""


@dataclass(frozen=True)
class Verification:
    schedule: str
    partition: tuple[int, ...]
    ranks: int
    updates: int
    minibatches: int
    dtype: str
    bound: float
    loss: Difference
    gradients: Difference
    weights: Difference

    @property
    def differences(self) -> dict[str, Difference]:
        return {"loss": self.loss, "gradients": self.gradients, "weights": self.weights}

    @property
    def ok(self) -> bool:
        return all(difference.largest <= self.bound for difference in self.differences.values())


@dataclass(frozen=True)
class _RankRun:
    """The results of one rank of the pipeline; tensors by stage and name, on the host."""

    layout: Layout
    batches: list[Any]
    losses: list[float]
    gradients: dict[StageTensor, Tensor]
    weights: dict[StageTensor, Tensor]


def verify_config(
    config: RunConfig,
    *,
    updates: int | None = None,
    dtype: str | None = None,
    device: str | None = None,
    report: Report = unreported,
) -> Verification:
    """Verify the run that a configuration describes, on synthetic data, or on the user's own where `data` names it.

    Its precision, `compile`, `compress` and learning-rate policy are not used: both ways compute in `dtype` without the
    compiler (compiled dropout draws other masks), nothing is rounded on its way, and the learning rate is constant.
    """
    work = build_workload(config)
    arguments = pipeline_arguments(config)
    schedule = arguments["schedule"]
    return verify(
        work.model,
        work.make_batch,
        loss_fn=work.loss_fn,
        loss_weight=configured_loss_weight(config),
        ranks=schedule.num_ranks if isinstance(schedule, Schedule) else config.ranks,
        updates=updates,
        dtype=dtype,
        device=device,
        report=report,
        **arguments,
    )


def verify(
    model: nn.Module,
    batch: Any,
    *,
    ranks: int = 2,
    optimizer: OptimizerFactory = partial(torch.optim.AdamW, lr=1e-3),  # noqa: B008 (it is not changed)
    loss_fn: Callable[..., Tensor] | None = None,
    updates: int | None = None,
    dtype: str | None = None,
    device: str | None = None,
    clip_norm: float | None = None,
    seed: int = 0,
    loss_weight: str | LossWeight = "samples",
    staleness: Iterable[Remedy] | Staleness = (),
    report: Report = unreported,
    **options: Any,
) -> Verification:
    """Train a copy of the model with and without the pipeline, in this process; compare losses, gradients, weights.

        result = vpipe.verify(model, batch, loss_fn=loss, schedule="zb-v", ranks=4)
        print(result.ok, result.weights)

    Dropout stays on: its masks do not depend on the partition.

    Args:
        model: The model, which is not changed.
        batch: One for all minibatches, or a function from the number of a minibatch to it.
        ranks: The number of ranks, which are threads of this process.
        optimizer: A function from a list of parameters to an optimizer.
        loss_fn: The loss from the model's output and the other fields; without it the output has to contain the loss.
        updates: Updates to train; by default 5, and in an asynchronous schedule as many more as it takes until every
            stage reads stale weights.
        dtype: "float64" or "float32"; by default float64, and float32 for a model that does not run in it.
        device: Where both ways compute, all ranks on one; by default the GPU if there is one.
        clip_norm: The largest norm of the gradients.
        seed: Seed of dropout.
        loss_weight: What a minibatch counts in the loss of its update, as for `vpipe.Pipeline`.
        staleness: Remedies for stale weights, as for `vpipe.Pipeline`.
        report: A function that is called with the share of the work that is done, and with what is being done.
        **options: Other arguments of `vpipe.Pipeline`, such as `schedule`, `minibatches` and `partition`.
    """
    if dtype is not None and dtype not in BOUNDS:
        raise VPipeError(f"dtype is {dtype!r}: {meant(dtype, BOUNDS)}")
    if updates is not None and updates < 1:
        raise VPipeError(f"updates is {updates}: it must be 1 or more")
    same: Any = {"optimizer": optimizer, "loss_fn": loss_fn, "seed": seed, "clip_norm": clip_norm}
    remedies = read_staleness(staleness)
    place = choose_device(device, 0)
    model = copy.deepcopy(model)

    def raw(number: int) -> Any:
        return batch(number) if callable(batch) else batch

    def made(number: int) -> Any:
        return _cast_all(raw(number), computing)

    def run(world: InProcessWorld) -> _RankRun:
        with Pipeline(
            model,
            first,
            **same,
            loss_weight=loss_weight,
            staleness=staleness,
            device=place,
            world=world,
            **options,
        ) as pipe:
            if computing == "float32" and pipe.optimizer_name == "muon":
                reason = "dtype is float32" if dtype else f"{type(model).__name__} does not run in float64"
                raise VPipeError(
                    f"{reason}, and optimizer muon computes in bfloat16 inside, which makes rounding of float32 large: "
                    f"choose {'float64, or ' if dtype else ''}another optimizer, such as adamw"
                )
            with world.exclusive:  # reading them may draw random numbers
                batches = [made(number) for number in range(_count(pipe.layout, updates, remedies))]
            return _run_rank(pipe, batches, report if pipe.rank == 0 else unreported)

    report(0.0, "capturing the model")
    with torch.random.fork_rng(devices=[]):
        computing = _set_dtype(model, raw(0), loss_fn, [dtype] if dtype else list(BOUNDS))
        first = made(0)
        runs = run_ranks(ranks, run, TIMEOUT)
        layout, batches = runs[0].layout, runs[0].batches
        recipe = Recipe(**same, loss_weight=loss_weigher(loss_weight, layout.graph))
        there = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(place), batches)
        expected = _train_plainly(model.to(place), there, layout, recipe, remedies, report)
    return _compare_runs(runs, expected, computing)


def _set_dtype(
    model: nn.Module, batch: Any, loss_fn: Callable[..., Tensor] | None, dtypes: Sequence[str]
) -> str:
    """Cast the model to the first of these in which it runs, which is returned: experts have no kernel in float64."""
    failures = []
    for dtype in dtypes:
        try:
            check_runs(model.to(getattr(torch, dtype)), _cast_all(batch, dtype), loss_fn, dtype)
        except VPipeError as error:
            failures.append(error)
        except Exception:  # not of the dtype: the capture says what, and where
            return dtype
        else:
            return dtype
    raise failures[0]


def _cast_all(batch: Any, dtype: str) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: cast(tensor, getattr(torch, dtype)), batch)


def _count(layout: Layout, updates: int | None, remedies: Staleness) -> int:
    """Minibatches of all updates; a schedule with a fixed number of them is run to its end."""
    schedule = layout.schedule
    wanted = (updates or UPDATES + schedule.lag + remedies.async_after) * schedule.update_interval
    length = schedule.minibatches or 1
    return -(-wanted // length) * length


def _run_rank(pipe: Pipeline, batches: list[Any], report: Report) -> _RankRun:
    gradients: dict[StageTensor, Tensor] = {}
    for stage in pipe.runtime.stages.values():
        _record_first_gradients(stage, gradients)
    losses = []
    updates = len(batches) // pipe.schedule.update_interval
    for _, loss in pipe.train(batches):
        losses.append(loss)
        share = len(losses) / updates
        report(share / 2, f"training with the pipeline, update {len(losses)} of {updates}")
    weights = {
        (stage.index, name): tensor.cpu()
        for stage in pipe.runtime.stages.values()
        for name, tensor in stage.optimizer.values().items()
    }
    return _RankRun(pipe.layout, batches, losses, gradients, weights)


def _record_first_gradients(stage: Stage, gradients: dict[StageTensor, Tensor]) -> None:
    """Keep the gradients of each base optimizer of the stage at its first update."""
    weights = stage.optimizer
    places = {id(m): (stage.index, n) for n, m in zip(weights.names, weights.master_parameters, strict=True)}
    updated: set[Optimizer] = set()

    def keep(optimizer: Optimizer, *_: object) -> None:
        if optimizer not in updated:
            updated.add(optimizer)
            given = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            gradients.update({places[id(p)]: p.grad.to("cpu", copy=True) for p in given})

    for optimizer in weights.optimizers:
        optimizer.register_step_pre_hook(keep)


def _train_plainly(
    model: nn.Module,
    batches: list[Any],
    layout: Layout,
    recipe: Recipe,
    remedies: Staleness,
    report: Report,
) -> Trained:
    schedule = layout.schedule
    updates = len(batches) // schedule.update_interval

    def updated(made: int) -> None:
        report(0.5 + made / updates / 2, f"training without the pipeline, update {made} of {updates}")

    plain = (model, batches, schedule.update_interval, recipe, layout.graph)
    if schedule.synchronous:
        return train_synchronously(*plain, on_update=updated)
    return train_asynchronously(
        *plain,
        stages=layout.stage_graphs,
        versions=versions_read(schedule, len(batches), remedies.async_after),
        lag=schedule.lag,
        on_update=updated,
        **remedies._asdict(),
    )


def _compare_runs(runs: Sequence[_RankRun], expected: Trained, dtype: str) -> Verification:
    layout = runs[0].layout
    unsteady = rounding_alone(expected.gradients)
    return Verification(
        schedule=layout.schedule.name,
        partition=layout.partition,
        ranks=len(runs),
        updates=len(expected.losses),
        minibatches=len(runs[0].batches),
        dtype=dtype,
        bound=BOUNDS[dtype],
        loss=compare_losses([run.losses for run in runs], expected.losses),
        gradients=compare_gradients([run.gradients for run in runs], expected.gradients),
        weights=compare_weights([run.weights for run in runs], expected.weights, unsteady),
    )
