"""Updates: at STEP gradients are summed, unscaled, clipped, checked, and make a new version of the weights.

In a synchronous schedule an update that is clipped, scaled or may be skipped is one event for the whole pipeline: the
norm is the global one (a tied parameter and a replicated stage count once) and an overflow anywhere skips the update
everywhere. So all ranks wait for the last one, also where they begin and end one after another (zb-v):

    rank 0    ▪▪▪▪▪▪▪▪▪▪··*▪▪▪▪▪▪▪▪▪▪
    rank 1     ▪▪▪▪▪▪▪▪▪▪·* ▪▪▪▪▪▪▪▪▪▪       ·: waiting for the norm, *: the update
    rank 2      ▪▪▪▪▪▪▪▪▪▪*  ▪▪▪▪▪▪▪▪▪▪

Where they are only to be finite, or the run ends (`on_nonfinite="stop"`), a rank whose own gradients are makes its
update without waiting. An asynchronous schedule has no such instant: each stage clips by its own norm and skips its own
update (tied parameters, which several stages must treat alike, by their own norm). The loss scale of update u + 1
depends on the overflows of updates up to u - lag, which every rank knows by then without waiting. Where ranks do not
wait for each other, neither does a host for its GPU's norms, unless a loss scale depends on them (`late_checks.py`).

A norm that is not finite, where no loss scale explains it, is a fault: `on_nonfinite` says whether the run stops or
only this update is skipped, until too many are (`nonfinite_limit`). Backward runs from the last stage to the first, so
the last stage with such gradients is their origin.
"""

import math
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vpipe.communication import CommunicationHandler
from vpipe.errors import NonFiniteError
from vpipe.record.thinning import is_written
from vpipe.runtime.gradients import GradientExchange
from vpipe.runtime.late_checks import LateChecks
from vpipe.stage.precision import LESS, LESS_OR_SKIP, LossScale
from vpipe.stage.stage import Stage
from vpipe.weights import NO_DELAY, Delay

NORM = "gradient norm"
NOBODY = -1
KEPT = 1000
"""Numbers of skipped updates that are remembered."""


@dataclass
class _Joint:
    """A synchronous update between the first and the last STEP of this rank's stages."""

    left: set[int]
    norm: float = 0.0
    tied: dict[int, dict[str, Tensor]] = field(default_factory=dict)


class Updates:
    def __init__(
        self,
        handler: CommunicationHandler,
        exchange: GradientExchange,
        stages: Mapping[int, Stage],
        *,
        synchronous: bool,
        interval: int,
        clip_norm: float | None,
        loss_scale: LossScale,
        on_nonfinite: str | None = None,
        nonfinite_limit: tuple[int, int] = (10, 100),
    ) -> None:
        self.handler = handler
        self.exchange = exchange
        self.stages = stages
        self.synchronous = synchronous
        self.clip_norm = clip_norm
        self.interval = interval
        self.loss_scale = loss_scale
        self.on_nonfinite = on_nonfinite
        self.warn: Callable[[str], object] = warnings.warn  # of updates that are skipped
        self.begun = dict.fromkeys(stages, 0)  # updates of each stage
        self.skipped: deque[int] = deque(maxlen=KEPT)  # the newest ones
        self.num_skipped = 0
        self._most_faults, self._window = nonfinite_limit
        self._faults: deque[int] = deque()  # skipped updates that no loss scale explains, within the window
        self._num_faults = 0
        # A GPU's host runs ahead of it, and must not wait for a norm; a loss scale is the host's.
        self._late = LateChecks(stops=on_nonfinite == "stop") if self._checks_late else None
        self._joint: _Joint | None = None
        self._unread: list[int] = []  # updates whose parts the others have posted, and nobody needed
        self._overflows: dict[int, bool] = {}  # own, until everybody's are known
        handler.register_tensor(NORM)
        handler.register_tensor("overflow")

    def step(self, stage: int, update: int) -> None:
        """Make an update of one stage."""
        self.begun[stage] = update + 1
        if self.synchronous and (self._waits or self._late is None):
            self._step_together(stage, update)
        else:
            self._step_alone(stage, update)

    def delay(self, stage: Stage, update: int) -> Delay:
        """Updates that will be made between a forward now and the update of its gradient."""
        if not stage.optimizer.predicts:
            return NO_DELAY
        tied = self.exchange.applied(stage.index)
        return Delay(
            update - self.begun[stage.index], {name: update - applied for name, applied in tied.items()}
        )

    def catch_up(self) -> None:
        """The pipeline is drained: apply the tied updates that are still due, and collect the remaining overflows."""
        if self._late is not None:
            self._read_late(self._late.skipped(all_of_them=True))
        self._read_others(left=0)
        for index, stage in self.stages.items():
            for gradients in self.exchange.overdue(index, max(self.begun.values())):
                if math.isfinite(norm := self._norm_of(gradients.values())):
                    stage.optimizer.step_tied(_scaled(gradients, self._clip_factor(norm)))
        self.exchange.postpone(max(self.begun.values()))
        for update in sorted(self._overflows):
            self._collect_overflow(update)

    def state(self) -> dict[str, Any]:
        """What the next updates depend on besides weights and optimizers. Call it when the pipeline is drained."""
        return {"loss_scale": self.loss_scale.state()}

    def load_state(self, state: Mapping[str, Any], updates: int) -> None:
        """Continue as if this many updates had been made here, also of every tied parameter."""
        self.loss_scale.load_state(state["loss_scale"])
        self.begun = dict.fromkeys(self.stages, updates)
        self.exchange.start_at(updates)

    @property
    def _watched(self) -> bool:
        """Whether the gradients' norm is needed."""
        return self.clip_norm is not None or self.loss_scale.enabled or self.on_nonfinite is not None

    @property
    def _waits(self) -> bool:
        """Synchronous: whether an update depends on the gradients of all ranks."""
        return self.clip_norm is not None or self.loss_scale.enabled or self.on_nonfinite == "skip"

    @property
    def _checks_late(self) -> bool:
        known_at_once = self._waits if self.synchronous else self.loss_scale.enabled
        return self._watched and self.handler.device.type == "cuda" and not known_at_once

    def _step_together(self, stage: int, update: int) -> None:
        if self._joint is None:
            self._joint = self._prepare_together(update)
        joint = self._joint
        joint.left.discard(stage)
        if not joint.left:
            self._joint = None
            self.loss_scale.update(not math.isfinite(joint.norm))
        if not math.isfinite(joint.norm):
            self.stages[stage].optimizer.skip()
            return
        factor = self._clip_factor(joint.norm)
        self._apply(stage, factor, _scaled(joint.tied[stage], factor))

    def _prepare_together(self, update: int) -> _Joint:
        """The first of this rank's stages does it for all of them: the norm is global, or that of the rank."""
        squares, worst = 0.0, NOBODY
        joint = _Joint(set(self.stages))
        for index in self.stages:
            self.exchange.sum_replicas(index, update)
            joint.tied[index] = self.exchange.tied_gradients(index, update)
            if self._watched and (not self._waits or self.handler.rank == self.exchange.placement[index][0]):
                held = joint.tied[index].items()
                counted = [g for n, g in held if not self._waits or self.exchange.tied[n][0] == index]
                square = self._norm_of(self._own_gradients(index)) ** 2 / self.loss_scale.value**2
                square += self._norm_of(counted) ** 2
                squares += square
                worst = worst if math.isfinite(square) else max(worst, index)
        if self._watched:
            parts = self._gathered(update, [squares, worst])
            joint.norm = math.sqrt(sum(square for square, _ in parts))
            if not math.isfinite(joint.norm):
                self._skip(update)
                self._judge(update, int(max(stage for _, stage in parts)))
        return joint

    def _gathered(self, update: int, part: list[float]) -> list[list[float]]:
        """The parts of all ranks; the own one alone where nothing depends on the others'."""
        if self._waits:
            return self.handler.all_gather(NORM, update, part)
        self.handler.post(NORM, update, part, self.handler.everyone())
        self._unread.append(update)
        if math.isfinite(part[0]):
            self._read_others(left=1)
            return [part]
        others = self.handler.collect(NORM, update, len(part), self.handler.everyone())
        return [part, *others.values()]

    def _read_others(self, left: int) -> None:
        """Take what they posted, until so many updates are left: one whose part was bad has ended the run."""
        while len(self._unread) > left:
            self.handler.collect(NORM, self._unread.pop(0), 2, self.handler.everyone())

    def _step_alone(self, stage: int, update: int) -> None:
        self.exchange.sum_replicas(stage, update)
        tied = self.exchange.tied_gradients(stage, update)
        if self._late is not None:
            self._read_late(self._late.skipped())
            if self.stages[stage].optimizer.skips_by_flag:
                self._step_without_waiting(self._late, stage, update, tied)
                return
        factor, overflow = 1.0, False
        if self._watched:
            norm = self._norm_of(self._own_gradients(stage)) / self.loss_scale.value
            factor = self._clip_factor(norm)
            norms = {name: self._norm_of([gradient]) for name, gradient in tied.items()}
            overflow = not all(map(math.isfinite, (norm, *norms.values())))
            tied = {n: g * self._clip_factor(norms[n]) for n, g in tied.items() if math.isfinite(norms[n])}
            if overflow:
                self._judge(update, stage)
            if not math.isfinite(norm):
                self._skip(update)
                self.stages[stage].optimizer.skip()
        self._apply(stage, factor, tied)
        if self.loss_scale.enabled:
            self.handler.post("overflow", update, [float(overflow)], self.handler.everyone())
            self._overflows[update] = overflow
            self._collect_overflow(update - self.exchange.lag)

    def _step_without_waiting(
        self, late: LateChecks, stage: int, update: int, tied: Mapping[str, Tensor]
    ) -> None:
        """Like `_step_alone`, but the device clips, and skips what is not finite: the host waits for no norm."""
        norms = {name: self._norm([gradient]) for name, gradient in tied.items()}
        own = self._norm(self._own_gradients(stage))
        if self.clip_norm is not None:
            self._scale_own(stage, self._clip_factor_on_device(own))
            tied = {n: g * self._clip_factor_on_device(norms[n]) for n, g in tied.items()}
        flags = {name: late.flag(norm) for name, norm in norms.items()}
        flag = late.flag(own)
        if self.on_nonfinite == "stop":
            flags = dict.fromkeys(flags, flag)  # it includes them: all or none
        self.stages[stage].optimizer.step(tied, flag, flags)
        late.note(update, stage, torch.stack([flag, *flags.values()]).amax())

    def _read_late(self, found: Iterable[tuple[int, int]]) -> None:
        for update, stage in found:
            self._skip(update)
            self._judge(update, stage)

    def _skip(self, update: int) -> None:
        self.skipped.append(update)
        self.num_skipped += 1

    def _judge(self, update: int, stage: int) -> None:
        """This stage's gradients are not finite, so the update is not made; the run ends if `on_nonfinite` says so."""
        if not (self.loss_scale.enabled and self.loss_scale.value > 1.0):
            first = update * self.interval
            last = first + self.interval - 1
            where = f"minibatch {first}" if first == last else f"minibatches {first} to {last}"
            found = f"update {update}, stage {stage}: the gradients of {where} are not finite"
            if self.on_nonfinite == "stop":
                raise NonFiniteError(f"{found}: the update is not made; {LESS_OR_SKIP}")
            if self.on_nonfinite == "skip":
                self._count_fault(update, found)

    def _count_fault(self, update: int, found: str) -> None:
        """Warn of an update that is skipped; raise if too many were, of those before it."""
        self._num_faults += 1
        if is_written(self._num_faults):
            self.warn(f"WARNING: {found}: the update is skipped")
        if update not in self._faults:  # a rank may have several stages
            self._faults.append(update)
        while self._faults[0] <= update - self._window:
            self._faults.popleft()
        if len(self._faults) >= self._most_faults:
            span = min(self._window, update + 1)
            raise NonFiniteError(
                f"{found}: {len(self._faults)} of the last {span} updates were skipped for this, and "
                f"nonfinite_limit ends the run at {self._most_faults} of {self._window}; {LESS}, or raise the limit"
            )

    def _collect_overflow(self, update: int) -> None:
        if update in self._overflows:
            flags = self.handler.collect("overflow", update, 1, self.handler.everyone()).values()
            self.loss_scale.update(self._overflows.pop(update) or any(flag for (flag,) in flags))

    def _apply(self, stage: int, factor: float, tied: Mapping[str, Tensor]) -> None:
        factor /= self.loss_scale.value
        if factor != 1.0:
            self._scale_own(stage, factor)
        self.stages[stage].optimizer.step(tied)

    def _scale_own(self, stage: int, factor: float | Tensor) -> None:
        if gradients := self._own_gradients(stage):
            torch._foreach_mul_(gradients, factor)

    def _own_gradients(self, stage: int) -> list[Tensor]:
        """Drop this list before `step()`: it frees gradients as it casts them."""
        return [p.grad for p in self.exchange.own_parameters(stage) if p.grad is not None]

    def _clip_factor(self, norm: float) -> float:
        """As torch.nn.utils.clip_grad_norm_ has it."""
        return 1.0 if self.clip_norm is None else min(1.0, self.clip_norm / (norm + 1e-6))

    def _clip_factor_on_device(self, norm: Tensor) -> Tensor:
        assert self.clip_norm is not None
        return (self.clip_norm / (norm + 1e-6)).clamp(max=1.0)

    def _norm_of(self, gradients: Iterable[Tensor]) -> float:
        return self._norm(gradients).item()

    def _norm(self, gradients: Iterable[Tensor]) -> Tensor:
        by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for gradient in gradients:
            by_dtype[gradient.dtype].append(gradient)
        norms: list[Tensor] = []
        for dtype, group in by_dtype.items():
            # In the gradients' own dtype, float32 at least: float16 squares overflow.
            norms += torch._foreach_norm(group, dtype=torch.promote_types(dtype, torch.float32))
        if not norms:
            return torch.zeros((), device=self.handler.device)
        return torch.linalg.vector_norm(torch.stack(norms))


def _scaled(gradients: Mapping[str, Tensor], factor: float) -> dict[str, Tensor]:
    # Not in place: another stage of this rank may read the same sum.
    return {name: gradient if factor == 1.0 else gradient * factor for name, gradient in gradients.items()}
