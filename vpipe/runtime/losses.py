"""The losses of a run: computed where the criterion is, read on every rank.

The ranks of the last stage send their part of an update's loss as soon as it is launched, long before the gradients of
that update have come back to the others; so no rank waits for a message when it reads the loss. On a GPU the number
itself is copied to the host behind the work launched before, and is read some updates later (`late`): a host that read
it at once would wait until its GPU had nothing left to do.

Requests (a number whose bits mean save or stop) travel with the loss, so that they reach every rank at the same update.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from vpipe.communication import CommunicationHandler
from vpipe.errors import NonFiniteError
from vpipe.stage.precision import LESS_OR_SKIP


class Arrived(NamedTuple):
    """The loss of an update, and the requests that came with it."""

    update: int
    loss: float
    requests: int


class Losses:
    def __init__(
        self,
        handler: CommunicationHandler,
        criterion_ranks: tuple[int, ...],
        late: int,
        take_requests: Callable[[], int],
        *,
        stop_unless_finite: bool,
    ) -> None:
        self.handler = handler
        self.criterion_ranks = criterion_ranks
        self.late = late
        self._take_requests = take_requests
        self._stop_unless_finite = stop_unless_finite
        self._parts: dict[int, dict[int, Tensor]] = {}  # update ▶ minibatch ▶ its share of the loss
        self._posted: dict[int, Tensor] = {}  # update ▶ own part of the loss, and requests
        self._coming: deque[tuple[int, list[Tensor], torch.cuda.Event | None]] = deque()
        handler.register_tensor("loss")

    def record(self, update: int, minibatch: int, loss: Tensor, share: float, expected: int) -> None:
        """One minibatch's loss and its share of the update, of which this rank has `expected` minibatches."""
        parts = self._parts.setdefault(update, {})
        parts[minibatch] = loss.double() * share
        if len(parts) == expected:
            self.post(update)

    def post(self, update: int) -> None:
        """Send this rank's part of the update's loss to every rank, also if it had no minibatch of it."""
        if update not in self._posted:
            parts = self._parts.pop(update, {})
            # Filled on the device: a copy of a number from the host would wait for the GPU.
            sent = torch.zeros(2, dtype=torch.float64, device=self.handler.device)
            sent[1].fill_(self._take_requests())
            for part in parts.values():
                sent[0] += part.reshape(())
            if self._stop_unless_finite and not sent.is_cuda and not math.isfinite(sent[0]):
                raise self._not_finite(update, parts)
            self._posted[update] = sent
            for rank in self.handler.everyone():
                self.handler.send("loss", sent, update, rank)

    def collect(self, update: int) -> None:
        """This rank has made the update: receive its loss, to be read later."""
        owner = ("loss", update)
        parts = [
            self._posted.pop(update)
            if rank == self.handler.rank
            else self.handler.recv("loss", update, rank, (2,), torch.float64, owner=owner).clone()
            for rank in self.criterion_ranks
        ]
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
        """Losses in order, without the `late` newest ones; the same at the same update on every rank."""
        while len(self._coming) > (0 if all_of_them else self.late):
            update, parts, copied = self._coming.popleft()
            if copied is not None:
                copied.synchronize()
            loss, requests = 0.0, 0
            for part, bits in map(Tensor.tolist, parts):
                loss += part
                requests |= int(bits)
            if self._stop_unless_finite and not math.isfinite(loss):
                raise NonFiniteError(f"update {update}: the loss is {loss}; {LESS_OR_SKIP}")
            yield Arrived(update, loss, requests)

    def _not_finite(self, update: int, parts: dict[int, Tensor]) -> NonFiniteError:
        minibatch, loss = next((m, float(p)) for m, p in parts.items() if not math.isfinite(p))
        return NonFiniteError(
            f"update {update}, rank {self.handler.rank}: the loss of minibatch {minibatch} is {loss}: "
            f"the update is not made; {LESS_OR_SKIP}"
        )
