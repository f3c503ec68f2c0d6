"""The losses of a run: made where the criterion is, read on every rank.

The ranks of the last stage send their part of an update's loss as soon as they have issued it, long before the
gradients of that update have come back to the others; so nobody waits for a message when reading it. On a GPU the
number itself is copied to the host behind whatever else was issued, and is read some updates later (`late`): a host
that asked for it at once would wait until its GPU had nothing left to do.

What is asked of the run (a number whose bits mean requests) travels with the loss, so that it reaches every rank at
the same update.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from vpipe.communication import CommunicationHandler
from vpipe.errors import NonFiniteError
from vpipe.stage.precision import LESS_OR_SKIP

Arrived = tuple[int, float]
"""An update and its loss."""


class Losses:
    def __init__(
        self,
        handler: CommunicationHandler,
        criterion_ranks: tuple[int, ...],
        late: int = 0,
        *,
        stop_unless_finite: bool = False,
    ) -> None:
        self.handler = handler
        self.criterion_ranks = criterion_ranks
        self.late = late
        self.asked: Callable[[], int] = lambda: 0  # what to send along with the next loss
        self._stop_unless_finite = stop_unless_finite
        self._parts: dict[int, dict[int, Tensor]] = {}  # update ▶ minibatch ▶ its share of the loss
        self._posted: dict[int, Tensor] = {}  # update ▶ own part of the loss, and requests
        self._coming: deque[tuple[int, list[Tensor], torch.cuda.Event | None]] = deque()
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
            # Filled on the device: a copy of a number from the host would wait for the GPU.
            told = torch.zeros(2, dtype=torch.float64, device=self.handler.device)
            told[1].fill_(self.asked())
            for part in parts.values():
                told[0] += part.reshape(())
            if self._stop_unless_finite and not told.is_cuda and not math.isfinite(told[0]):
                raise self._not_finite(update, parts)
            self._posted[update] = told
            for rank in self.handler.everyone():
                self.handler.send("loss", told, update, rank)

    def ask(self, update: int) -> None:
        """This rank has made the update: its loss will be read."""
        parts = []
        owner = ("loss", update)
        for rank in self.criterion_ranks:
            if rank == self.handler.rank:
                parts.append(self._posted.pop(update))
            else:
                parts.append(
                    self.handler.recv("loss", update, rank, (2,), torch.float64, owner=owner).clone()
                )
        self.handler.release(owner)
        copied = None
        if parts[0].is_cuda:
            parts = [
                torch.empty_like(p, device="cpu", pin_memory=True).copy_(p, non_blocking=True) for p in parts
            ]
            copied = torch.cuda.Event()
            copied.record()
        self._coming.append((update, parts, copied))

    def arrived(self, *, all_of_them: bool = False) -> Iterator[Arrived]:
        """Losses in order, all but the `late` newest ones; the same at the same update on every rank."""
        while len(self._coming) > (0 if all_of_them else self.late):
            update, parts, copied = self._coming.popleft()
            if copied is not None:
                copied.synchronize()
            loss = 0.0
            for part, flags in map(Tensor.tolist, parts):
                loss += part
                if flags:
                    self._requests[update] = self._requests.get(update, 0) | int(flags)
            if self._stop_unless_finite and not math.isfinite(loss):
                raise NonFiniteError(f"update {update}: the loss is {loss}; {LESS_OR_SKIP}")
            yield update, loss

    def requests_of(self, update: int) -> int:
        """What was asked for with the loss of this update, the same on every rank; it is told once."""
        return self._requests.pop(update, 0)

    def _not_finite(self, update: int, parts: dict[int, Tensor]) -> NonFiniteError:
        minibatch, loss = next((m, float(p)) for m, p in parts.items() if not math.isfinite(p))
        return NonFiniteError(
            f"update {update}, rank {self.handler.rank}: the loss of minibatch {minibatch} is {loss}: "
            f"the update is not made; {LESS_OR_SKIP}"
        )
