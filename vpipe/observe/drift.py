"""Drift between weight versions: how far the weights move while a gradient is under way, and whether it suffers.

Every EVERY updates of a stage whose gradients are old, for a sample of its weights:
- drift: the norm of the difference between the weights that a gradient is of and those that it is applied to, relative
  to the weights. Prediction makes it smaller.
- unseen: the cosine between the direction of that update and the next gradient, which is of weights without it.
- seen: the cosine between the same direction and the first gradient that is of weights with it.

With fresh weights a gradient that has seen an update is about at right angles to it. What an unseen update has in
common with the next gradient, and a seen one no longer has, is a step that is made again and again until the gradient
turns: it overshoots. The figures are sums on the device, which the host reads without waiting for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vpipe.cost import StaleTraining
from vpipe.record.status import StageDrift
from vpipe.schedule import Op
from vpipe.schedule.facts import holdings, sample
from vpipe.system.device import copied_to_host

if TYPE_CHECKING:
    from vpipe.pipeline import Pipeline
    from vpipe.runtime.prefetch import Work
    from vpipe.stage.stage import Stage

EVERY = 20
"""Updates between two samples, or more where gradients are older."""
COORDINATES = 2**16
"""Weights of a stage that are looked at."""
LATE = 4
"""Figures that may be on their way to the host."""


@dataclass
class _Watched:
    """One stage: what it has found so far, and the update that is followed now."""

    delay: int
    sums: dict[str, float] = field(default_factory=lambda: {"drift": 0.0, "unseen": 0.0, "seen": 0.0})
    counts: dict[str, int] = field(default_factory=lambda: {"drift": 0, "unseen": 0, "seen": 0})
    followed: tuple[int, Tensor] | None = None
    """An update with its direction."""


class DriftMeter:
    """Watches the stages of this rank whose gradients are old; where none are it costs nothing."""

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe = pipe
        self._coming: deque[tuple[_Watched, str, Tensor, torch.cuda.Event | None]] = deque()
        held = [] if pipe.schedule.synchronous else holdings(sample(pipe.schedule))
        self._stages = {
            index: _Watched(held[index].staleness)
            for index in pipe.runtime.stages
            if held and held[index].staleness
        }
        self._factor = 1.0
        if self._stages:
            predicts = any(stage.optimizer.predicts for stage in pipe.runtime.stages.values())
            self._factor = StaleTraining(pipe.optimizer_name, predicts).factor(pipe.schedule)
            pipe.on_action(self._around, (Op.B, Op.I, Op.STEP))

    def figures(self) -> tuple[StageDrift, ...]:
        """Of each stage that has a sample of all three."""
        self._read(LATE)
        return tuple(
            StageDrift(
                stage=index,
                delay=watched.delay,
                **{name: watched.sums[name] / watched.counts[name] for name in watched.sums},
                samples=watched.counts["seen"],
                optimizer=self._pipe.optimizer_name,
                predicted=self._pipe.runtime.stages[index].optimizer.predicts,
                factor=self._factor,
            )
            for index, watched in self._stages.items()
            if all(watched.counts.values())
        )

    def _around(self, work: Work) -> Callable[[], object] | None:
        watched = self._stages.get(work.stage.index)
        if watched is None:
            return None
        update, stage = work.minibatch.update, work.stage
        due = update % max(EVERY, watched.delay + 2) == 0
        if work.action.op is not Op.STEP:
            return (lambda: self._note_drift(watched, stage)) if due else None
        if watched.followed is not None:
            self._compare(watched, stage, update)
        return self._follow(watched, stage, update) if due else None

    @torch.no_grad()
    def _note_drift(self, watched: _Watched, stage: Stage) -> None:
        """A backward has just read its version again."""
        optimizer = stage.optimizer
        now = _sampled(list(optimizer.values().values()))
        read = _sampled(optimizer.current.tensors).to(now.dtype)
        self._add(watched, "drift", (read - now).norm() / now.norm())

    @torch.no_grad()
    def _follow(self, watched: _Watched, stage: Stage, update: int) -> Callable[[], None]:
        before = _sampled(_own(stage, stage.optimizer.master_parameters))

        @torch.no_grad()
        def after() -> None:
            watched.followed = (update, before - _sampled(_own(stage, stage.optimizer.master_parameters)))

        return after

    @torch.no_grad()
    def _compare(self, watched: _Watched, stage: Stage, update: int) -> None:
        assert watched.followed is not None
        made, direction = watched.followed
        for name, place in (("unseen", made + 1), ("seen", made + 1 + watched.delay)):
            if update == place:
                gradients = [
                    torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    for parameter in _own(stage, stage.optimizer.model_parameters)
                ]
                found = torch.cosine_similarity(_sampled(gradients).to(direction.dtype), direction, dim=0)
                self._add(watched, name, found)
        if update > made + watched.delay:
            watched.followed = None

    def _add(self, watched: _Watched, name: str, value: Tensor) -> None:
        self._coming.append((watched, name, *copied_to_host(value)))
        self._read(LATE)

    def _read(self, left: int) -> None:
        """Add up what has come; of a CPU all has."""
        while self._coming:
            watched, name, value, copied = self._coming[0]
            if copied is not None and len(self._coming) <= left and not copied.query():
                return
            if copied is not None:
                copied.synchronize()
            self._coming.popleft()
            if torch.isfinite(value):
                watched.sums[name] += value.item()
                watched.counts[name] += 1


def _own(stage: Stage, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Those that this stage alone updates."""
    tied = stage.optimizer.tied_optimizers
    return [p for name, p in zip(stage.optimizer.names, parameters, strict=True) if name not in tied]


def _sampled(tensors: Sequence[Tensor]) -> Tensor:
    """The first values of each, as one tensor of its own."""
    share = max(1, COORDINATES // max(1, len(tensors)))

    def parts() -> Iterator[Tensor]:
        for tensor in tensors:
            yield tensor.detach().reshape(-1)[:share].float()

    return torch.cat(list(parts())) if tensors else torch.zeros(1)
