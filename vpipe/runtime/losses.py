"""The losses of a run: made where the criterion is, read on every rank.

The ranks of the last stage post their part of an update's loss as soon as they have it, long before the
gradients of that update have come back to the others; so nobody waits when reading it.
"""

from torch import Tensor

from vpipe.communication import CommunicationHandler


class Losses:
    def __init__(self, handler: CommunicationHandler, criterion_ranks: tuple[int, ...]) -> None:
        self.handler = handler
        self.criterion_ranks = criterion_ranks
        self._parts: dict[int, list[Tensor]] = {}
        self._posted: dict[int, float] = {}
        handler.register_tensor("loss")

    def record(self, update: int, loss: Tensor, share: float, expected: int) -> None:
        """One minibatch's loss and its share of the update, of which this rank has `expected` minibatches."""
        parts = self._parts.setdefault(update, [])
        parts.append(loss.double() * share)
        if len(parts) == expected:
            self.post(update)

    def post(self, update: int) -> None:
        """Tell everybody this rank's part of the update's loss; also a rank that had none of it does."""
        if update not in self._posted:
            part = float(sum(self._parts.pop(update, [])))
            self._posted[update] = part
            self.handler.post("loss", update, [part], self.handler.everyone())

    def read(self, update: int) -> float:
        """The loss of an update, on any rank."""
        others = [rank for rank in self.criterion_ranks if rank != self.handler.rank]
        parts = {rank: part for rank, (part,) in self.handler.collect("loss", update, 1, others).items()}
        if self.handler.rank in self.criterion_ranks:
            parts[self.handler.rank] = self._posted.pop(update)
        return sum(parts[rank] for rank in self.criterion_ranks)
