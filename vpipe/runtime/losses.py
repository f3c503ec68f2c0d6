"""The losses of a run: made where the criterion is, read on every rank.

The ranks of the last stage post their part of an update's loss as soon as they have it, long before the
gradients of that update have come back to the others; so nobody waits when reading it.

What is asked of the run (a number whose bits mean requests) travels with the loss, so that it reaches
every rank at the same update.
"""

import math
from collections.abc import Callable

from torch import Tensor

from vpipe.communication import CommunicationHandler
from vpipe.errors import NonFiniteError
from vpipe.runtime.precision import LESS_OR_SKIP


class Losses:
    def __init__(
        self,
        handler: CommunicationHandler,
        criterion_ranks: tuple[int, ...],
        *,
        stop_unless_finite: bool = False,
    ) -> None:
        self.handler = handler
        self.criterion_ranks = criterion_ranks
        self.asked: Callable[[], int] = lambda: 0  # what to send along with the next loss
        self._stop_unless_finite = stop_unless_finite
        self._parts: dict[int, dict[int, Tensor]] = {}  # update ▶ minibatch ▶ its share of the loss
        self._posted: dict[int, tuple[float, float]] = {}
        self._requests: dict[int, int] = {}
        handler.register_tensor("loss")

    def record(self, update: int, minibatch: int, loss: Tensor, share: float, expected: int) -> None:
        """One minibatch's loss and its share of the update, of which this rank has `expected` minibatches."""
        parts = self._parts.setdefault(update, {})
        parts[minibatch] = loss.double() * share
        if len(parts) == expected:
            self.post(update)

    def post(self, update: int) -> None:
        """Tell everybody this rank's part of the update's loss; also a rank that had none of it does."""
        if update not in self._posted:
            parts = self._parts.pop(update, {})
            part = float(sum(parts.values()))
            if self._stop_unless_finite and not math.isfinite(part):
                raise self._not_finite(update, parts)
            self._posted[update] = (part, float(self.asked()))
            self.handler.post("loss", update, self._posted[update], self.handler.everyone())

    def read(self, update: int) -> float:
        """The loss of an update, on any rank."""
        others = [rank for rank in self.criterion_ranks if rank != self.handler.rank]
        parts = {rank: (p, f) for rank, (p, f) in self.handler.collect("loss", update, 2, others).items()}
        if self.handler.rank in self.criterion_ranks:
            parts[self.handler.rank] = self._posted.pop(update)
        for _, flags in parts.values():
            if flags:
                self._requests[update] = self._requests.get(update, 0) | int(flags)
        return sum(parts[rank][0] for rank in self.criterion_ranks)

    def requests_of(self, update: int) -> int:
        """What was asked for with the loss of this update, the same on every rank; it is told once."""
        return self._requests.pop(update, 0)

    def _not_finite(self, update: int, parts: dict[int, Tensor]) -> NonFiniteError:
        minibatch, loss = next((m, float(p)) for m, p in parts.items() if not math.isfinite(p))
        return NonFiniteError(
            f"update {update}, rank {self.handler.rank}: the loss of minibatch {minibatch} is {loss}: "
            f"the update is not made; {LESS_OR_SKIP}"
        )
