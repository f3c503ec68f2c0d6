"""The losses of a run: computed where the criterion is, read on every rank.

The ranks of the last stage send their part of an update's loss to the others as plain numbers, through host memory. On
a CPU that is when the last forward of the update is done, long before the gradients of that update have come back to
the others. On a GPU the number is copied to the host behind the work launched before, is sent as soon as it is there,
and is read some updates later (`late`): a host that read it at once would wait until its GPU had nothing left to do.
So no rank waits for a loss.

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
from vpipe.system.device import copied_to_host

NAME = "loss"


class Arrived(NamedTuple):
    """The loss of an update, and the requests that came with it."""

    update: int
    loss: float
    requests: int


class _OwnLoss(NamedTuple):
    """This rank's part of an update's loss."""

    loss: Tensor
    """In host memory, once the event has passed."""
    copied: torch.cuda.Event | None
    requests: int

    def is_there(self) -> bool:
        return self.copied is None or self.copied.query()

    def numbers(self) -> list[float]:
        if self.copied is not None:
            self.copied.synchronize()
        return [float(self.loss), float(self.requests)]


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
        self._own: dict[int, _OwnLoss] = {}  # by update, until it is read here
        self._unsent: deque[int] = deque()
        self._awaited = -1  # the newest update whose loss a receive was posted for
        self._coming: deque[int] = deque()  # updates that this rank has made and whose loss was not read
        handler.register_tensor(NAME)

    def begin(self, update: int) -> None:
        """This rank begins the update, so that it will read its loss."""
        if update > self._awaited:
            self._awaited = update
            self.handler.expect_numbers(NAME, update, 2, self._others())

    def record(self, update: int, minibatch: int, loss: Tensor, share: float, expected: int) -> None:
        """One minibatch's loss and its share of the update, of which this rank has `expected` minibatches."""
        parts = self._parts.setdefault(update, {})
        parts[minibatch] = loss.double() * share
        if len(parts) == expected:
            self.post(update)
        self._send()

    def post(self, update: int) -> None:
        """Give this rank's part of the update's loss to every rank, also if it had no minibatch of it.

        Called at the latest when the rank makes the update: then all that others read with this update must be sent.
        """
        if update not in self._own:
            parts = self._parts.pop(update, {})
            total = torch.zeros((), dtype=torch.float64, device=self.handler.device)
            for part in parts.values():
                total += part.reshape(())
            if self._stop_unless_finite and not total.is_cuda and not math.isfinite(total):
                raise self._not_finite(update, parts)
            self._own[update] = _OwnLoss(*copied_to_host(total), self._take_requests())
            self._unsent.append(update)
        self._send(update - self.late)

    def expect(self, update: int) -> None:
        """This rank has made the update: its loss is to be read."""
        self._coming.append(update)

    def arrived(self, *, all_of_them: bool = False) -> Iterator[Arrived]:
        """Losses in order, without the `late` newest ones; the same at the same update on every rank."""
        while len(self._coming) > (0 if all_of_them else self.late):
            update = self._coming.popleft()
            self._send(update)
            numbers = self.handler.collect(NAME, update, 2, self._others())
            if self.handler.rank in self.criterion_ranks:
                numbers[self.handler.rank] = self._own.pop(update).numbers()
            loss, requests = 0.0, 0
            for rank in self.criterion_ranks:
                part, bits = numbers[rank]
                loss += part
                requests |= int(bits)
            if self._stop_unless_finite and not math.isfinite(loss):
                raise NonFiniteError(f"update {update}: the loss is {loss}; {LESS_OR_SKIP}")
            yield Arrived(update, loss, requests)

    def _others(self) -> list[int]:
        return [rank for rank in self.criterion_ranks if rank != self.handler.rank]

    def _send(self, until: int = -1) -> None:
        """Send the parts that have reached the host, and those up to this update in any case."""
        while self._unsent and (self._unsent[0] <= until or self._own[self._unsent[0]].is_there()):
            update = self._unsent.popleft()
            self.handler.post(NAME, update, self._own[update].numbers(), self.handler.everyone())

    def _not_finite(self, update: int, parts: dict[int, Tensor]) -> NonFiniteError:
        minibatch, loss = next((m, float(p)) for m, p in parts.items() if not math.isfinite(p))
        return NonFiniteError(
            f"update {update}, rank {self.handler.rank}: the loss of minibatch {minibatch} is {loss}: "
            f"the update is not made; {LESS_OR_SKIP}"
        )
