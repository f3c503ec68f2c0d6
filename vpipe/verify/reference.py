"""Independent references: the plain model, trained in one process by the textbook's formulas.

Nothing here uses vpipe's runtime, stage modules or weight versions. Only two facts come from the captured graph:
the block of each random draw, and the stages of each parameter (`vpipe.verify.eager`).
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vpipe.graph import ModelGraph, StageGraph
from vpipe.graph import tied as tied_parameters
from vpipe.schedule import Op, Schedule
from vpipe.verify.eager import EagerModel

OptimizerFactory = Callable[[Any], Any]
LossWeight = Callable[[dict[str, Tensor]], float]
OnUpdate = Callable[[int], object]
"""Called with the number of updates that have been made."""
Versions = Mapping[tuple[int, int], int]
"""(stage, minibatch) ▶ the number of updates that the stage has made before the minibatch's forward."""


class Trained(NamedTuple):
    """The results of a run; gradients are those of the first update, as the optimizer got them."""

    losses: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class Recipe:
    """How a model is trained both ways: arguments of `Pipeline`, under the same names."""

    optimizer: OptimizerFactory
    loss_fn: Callable[..., Tensor] | None = None
    seed: int = 0
    clip_norm: float | None = None
    loss_weight: LossWeight = lambda fields: 1.0


def train_synchronously(
    model: nn.Module,
    minibatches: Sequence[Any],
    per_update: int,
    recipe: Recipe,
    graph: ModelGraph,
    *,
    on_update: OnUpdate = lambda made: None,
) -> Trained:
    """Gradient accumulation with a copy of the plain model."""
    plain = _in_training(copy.deepcopy(model))
    eager = EagerModel(plain, graph, recipe.loss_fn, recipe.seed)
    values = _trained(plain)
    optimizers = _make_optimizers(recipe.optimizer, values, values)
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for group in _groups(minibatches, per_update, graph, recipe.loss_weight):
        mean = 0.0
        for minibatch, batch, share in group:
            loss = eager.loss(batch, minibatch)
            (loss * share).backward()
            mean += loss.item() * share
        if recipe.clip_norm is not None:
            nn.utils.clip_grad_norm_(plain.parameters(), recipe.clip_norm)
        gradients = gradients or _gradients(plain.named_parameters())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(mean)
        on_update(len(losses))
    return Trained(losses, gradients, {name: p.detach() for name, p in plain.named_parameters()})


class WeightHistory:
    """Versions of some parameters: w(t + 1) = w(t) - update(gradient); each w(t) that will be read is kept."""

    def __init__(
        self, values: Mapping[str, Tensor], optimizer: OptimizerFactory, model_names: Collection[str]
    ) -> None:
        self.now = {name: nn.Parameter(value.detach().clone()) for name, value in values.items()}
        self.optimizers = _make_optimizers(optimizer, self.now, model_names)
        self.updates = 0
        self.versions = {0: self.newest()}
        self.steps = {0: {name: torch.zeros_like(value) for name, value in self.now.items()}}
        """By version: what the next update is expected to add to it."""

    def newest(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.now.items()}

    def update(self, gradients: Mapping[str, Tensor | None], clip_norm: float | None) -> dict[str, Tensor]:
        """Make the next version; returns the gradients as the optimizer got them."""
        for name, tensor in self.now.items():
            tensor.grad = gradients[name]
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(self.now.values(), clip_norm)
        used = _gradients(self.now.items())
        before = self.versions[self.updates]
        for optimizer in self.optimizers:
            optimizer.step()
        self.updates += 1
        newest = self.versions[self.updates] = self.newest()
        self.steps[self.updates] = {
            name: _next_step(self.optimizers, tensor, newest[name] - before[name])
            for name, tensor in self.now.items()
        }
        return used

    def predicted(self, version: int, update: int) -> dict[str, Tensor]:
        """The version as it is expected to be when this update is made."""
        steps = self.steps[version]
        return {n: value + (update - version) * steps[n] for n, value in self.versions[version].items()}

    def drop(self, before: int) -> None:
        """Drop the versions before this one: they will not be read."""
        for number in [number for number in self.versions if number < min(before, self.updates)]:
            del self.versions[number], self.steps[number]


class StagedWeights:
    """The versions of all stages' weights: each stage makes its own updates, when the schedule says.

    A parameter that several stages hold is one parameter, updated with the sum of their gradients. The first
    of these stages applies an update at once, the others `lag` updates later. With `split_tied` all apply it at
    once; the gradients of all but the last of these stages are part of it `lag` updates later (`gradient_update`).
    """

    def __init__(
        self,
        values: Mapping[str, Tensor],
        stages: Sequence[StageGraph],
        versions: Versions,
        lag: int,
        optimizer: OptimizerFactory,
        per_update: int,
        async_after: int,
        predict: bool,
        split_tied: bool,
    ) -> None:
        self.split_tied = split_tied
        self.versions = versions
        self.lag = lag
        self.per_update = per_update
        self.async_after = async_after
        self.predict = predict
        self.holders = {name: where for name, where in tied_parameters(stages).items() if name in values}
        own = [[n for n in stage.parameters if n in values and n not in self.holders] for stage in stages]
        self.stages = [WeightHistory({n: values[n] for n in names}, optimizer, values) for names in own]
        self.tied = {n: WeightHistory({n: values[n]}, optimizer, values) for n in self.holders}

    @property
    def histories(self) -> list[WeightHistory]:
        return [*self.stages, *self.tied.values()]

    def read(self, minibatch: int) -> tuple[dict[str, Tensor], dict[str, dict[int, Tensor]]]:
        """New leaf tensors with the minibatch's weights: by name, and for tied parameters by name and stage."""
        own: dict[str, Tensor] = {}
        for stage, history in enumerate(self.stages):
            version = self._weights(history, self.versions[stage, minibatch], minibatch)
            own |= {name: _leaf(value) for name, value in version.items()}
        tied = {
            name: {
                s: _leaf(self._weights(history, self._tied_version(name, s, minibatch), minibatch)[name])
                for s in holders
            }
            for (name, holders), history in zip(self.holders.items(), self.tied.values(), strict=True)
        }
        return own, tied

    def update(self, gradients: Mapping[str, Tensor | None], clip_norm: float | None) -> dict[str, Tensor]:
        used: dict[str, Tensor] = {}
        for history in self.histories:
            used |= history.update(gradients, clip_norm)
        return used

    def drop(self, later: range) -> None:
        """Drop the versions that none of these minibatches, which are still to come, will read."""
        for stage, history in enumerate(self.stages):
            history.drop(min((self.versions[stage, m] for m in later), default=0))
        for name, history in self.tied.items():
            oldest = (self._tied_version(name, s, m) for s in self.holders[name] for m in later)
            history.drop(min(oldest, default=0))

    def newest(self) -> dict[str, Tensor]:
        return {name: value for history in self.histories for name, value in history.newest().items()}

    def gradient_update(self, name: str, stage: int, minibatch: int) -> int:
        """The update that has this stage's gradient of a tied parameter."""
        update = minibatch // self.per_update
        split = self.split_tied and update >= self.async_after
        return update + self.lag if split and stage != self.holders[name][-1] else update

    def _tied_version(self, name: str, stage: int, minibatch: int) -> int:
        split = self.split_tied and minibatch >= self.async_after * self.per_update
        late = 0 if split or stage == self.holders[name][0] else self.lag
        # When the pipeline is drained all holders are equal.
        drained = min(minibatch // self.per_update, self.async_after)
        return max(drained, self.versions[stage, minibatch] - late)

    def _weights(self, history: WeightHistory, version: int, minibatch: int) -> dict[str, Tensor]:
        if self.predict:
            return history.predicted(version, minibatch // self.per_update)
        return history.versions[version]


def train_asynchronously(
    model: nn.Module,
    minibatches: Sequence[Any],
    per_update: int,
    recipe: Recipe,
    graph: ModelGraph,
    *,
    stages: Sequence[StageGraph],
    versions: Versions,
    lag: int,
    async_after: int = 0,
    predict: bool = False,
    split_tied: bool = False,
    on_update: OnUpdate = lambda made: None,
) -> Trained:
    """Each minibatch reads in each stage the version that follows from the schedule (`versions_read`).

    With `predict` it reads the version as it is expected to be when the minibatch's own update is made. The first
    `async_after` updates are made one after the other.

    A stage clips by the norm of its own gradients, a tied parameter by the norm of its gradient.
    """
    plain = _in_training(copy.deepcopy(model))
    eager = EagerModel(plain, graph, recipe.loss_fn, recipe.seed, stages)
    values = _trained(plain)
    weights = StagedWeights(
        values, stages, versions, lag, recipe.optimizer, per_update, async_after, predict, split_tied
    )
    losses: list[float] = []
    first: dict[str, Tensor] = {}
    by_update: dict[int, dict[str, Tensor | None]] = defaultdict(lambda: dict.fromkeys(values))
    for group in _groups(minibatches, per_update, graph, recipe.loss_weight):
        mean = 0.0
        for minibatch, batch, share in group:
            own, tied = weights.read(minibatch)
            loss = eager.loss(batch, minibatch, own, tied)
            (loss * share).backward()
            mean += loss.item() * share
            update = minibatch // per_update
            leaves = [(update, name, leaf) for name, leaf in own.items()]
            for name in tied:
                leaves += [
                    (weights.gradient_update(name, s, minibatch), name, leaf)
                    for s, leaf in tied[name].items()
                ]
            for number, name, leaf in leaves:
                if leaf.grad is not None:
                    known = by_update[number][name]
                    by_update[number][name] = leaf.grad if known is None else known + leaf.grad
        used = weights.update(by_update.pop(update), recipe.clip_norm)
        first = first or used
        losses.append(mean)
        on_update(len(losses))
        weights.drop(range(group[-1][0] + 1, len(minibatches)))
    frozen = {name: p.detach() for name, p in plain.named_parameters()}
    return Trained(losses, first, frozen | weights.newest())


def versions_read(schedule: Schedule, count: int, async_after: int = 0) -> dict[tuple[int, int], int]:
    """The versions that the first `count` minibatches read, from the programs: STEP makes one, F reads the newest.

    The first `async_after` updates are made one after the other, so their minibatches read the newest version.
    """
    if async_after:
        interval, stages = schedule.update_interval, range(schedule.num_stages)
        first = min(count, async_after * interval)
        fresh = {(stage, m): m // interval for stage in stages for m in range(first)}
        later = versions_read(schedule, count - first)
        return fresh | {(s, first + m): async_after + version for (s, m), version in later.items()}
    read: dict[tuple[int, int], int] = {}
    length = schedule.minibatches or count
    for rank in range(schedule.num_ranks):
        made: Counter[int] = Counter()
        for start in range(0, count, length):
            exists = range(min(length, count - start)).__contains__
            for stage, op, minibatch in schedule.program(rank, exists):
                if op is Op.STEP:
                    made[stage] += 1
                elif op is Op.F:
                    read[stage, start + minibatch] = made[stage]
    return read


def _next_step(optimizers: Sequence[Optimizer], tensor: nn.Parameter, last: Tensor) -> Tensor:
    """What the next update adds if its gradient equals the mean that the optimizer keeps; else what the last added."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            state = optimizer.state.get(tensor)
            if not any(tensor is own for own in group["params"]) or not state:
                continue
            if isinstance(optimizer, torch.optim.Adam | torch.optim.NAdam):  # AdamW is an Adam
                beta1, beta2 = group["betas"]
                mean = state["exp_avg"] / (1 - beta1 ** float(state["step"]))
                square = state["exp_avg_sq"] / (1 - beta2 ** float(state["step"]))
                return -group["lr"] * mean / (square.sqrt() + group["eps"])
            if isinstance(optimizer, torch.optim.SGD) and group["momentum"]:
                return -group["lr"] * state["momentum_buffer"]
    return last


def _groups(
    minibatches: Sequence[Any],
    per_update: int,
    graph: ModelGraph,
    loss_weight: LossWeight,
) -> Iterable[list[tuple[int, Any, float]]]:
    """The minibatches of each update: number, batch, share of the update's loss."""
    for start in range(0, len(minibatches), per_update):
        group = minibatches[start : start + per_update]
        weights = [loss_weight(graph.batch_fields(batch)) for batch in group]
        total = sum(weights)
        yield [
            (start + i, batch, weight / total if total else 0.0)
            for i, (batch, weight) in enumerate(zip(group, weights, strict=True))
        ]


def _in_training(model: nn.Module) -> nn.Module:
    """The model in training mode; if it is in it already, its modules keep their own modes."""
    return model if model.training else model.train()


class _Parameters(list[nn.Parameter]):
    """The argument of `optimizer=`: a list with names, as `vpipe.weights.NamedParameters` is one."""

    def __init__(self, named: Mapping[str, nn.Parameter], model_names: Collection[str]) -> None:
        super().__init__(named.values())
        self.named = lambda: list(named.items())
        self.model_names = model_names


def _make_optimizers(
    factory: OptimizerFactory, named: Mapping[str, nn.Parameter], model_names: Collection[str]
) -> list[Optimizer]:
    made = factory(_Parameters(named, model_names)) if named else None
    return [o for o in (made if isinstance(made, list | tuple) else [made]) if o is not None]


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _gradients(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.grad.clone() for name, tensor in named if tensor.grad is not None}


def _leaf(value: Tensor) -> Tensor:
    return value.detach().clone().requires_grad_()
