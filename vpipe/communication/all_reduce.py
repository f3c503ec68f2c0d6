"""The sum of a tensor over some ranks, begun at one time and finished at another.

Over NCCL it is one all-reduce. Over any other channel each of R ranks adds up one part of R:

    begin    each rank sends part j to rank j                                   (R - 1) / R of the tensor
    finish   rank j adds up what it got of part j, in the order of the ranks,
             and sends the sum to the others                                    (R - 1) / R of the tensor

As each part is added up once, in an order that the list of ranks gives, all ranks have equal sums to the last bit, in
every run. `finish` waits until all ranks have come to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vpipe.communication.handler import CommunicationHandler
    from vpipe.communication.nccl import NcclWork


class AllReduce(Protocol):
    def finish(self) -> Tensor:
        """The sum, in memory of its own."""


class NativeAllReduce:
    def __init__(self, work: NcclWork, tensor: Tensor) -> None:
        self._work = work
        self._tensor = tensor

    def finish(self) -> Tensor:
        self._work.wait()
        return self._tensor


class ExchangedAllReduce:
    """Parts go by the name's forward stream, their sums by its backward stream."""

    def __init__(
        self, handler: CommunicationHandler, name: str, number: int, tensor: Tensor, ranks: Sequence[int]
    ) -> None:
        self._handler = handler
        self._name = name
        self._number = number
        self._ranks = ranks
        self._parts = tensor.tensor_split(len(ranks))
        for rank, part in zip(ranks, self._parts, strict=True):
            if rank != handler.rank:
                handler.send(name, part, number, rank)

    def finish(self) -> Tensor:
        handler, owner = self._handler, (self._name, self._number)
        mine = self._parts[self._ranks.index(handler.rank)]
        total = None
        for rank in self._ranks:
            part = mine if rank == handler.rank else self._receive(rank, mine, backward=False)
            total = part.clone() if total is None else total.add_(part)
        assert total is not None
        for rank in self._ranks:
            if rank != handler.rank:
                handler.send(self._name, total, self._number, rank, backward=True)
        sums = []
        for rank, part in zip(self._ranks, self._parts, strict=True):
            if rank == handler.rank:
                sums.append(total)
            else:
                sums.append(self._receive(rank, part, backward=True))
                handler.confirm(self._name, self._number, rank)  # our part is in that sum
        whole = torch.cat(sums)
        handler.release(owner)
        return whole

    def _receive(self, rank: int, like: Tensor, *, backward: bool) -> Tensor:
        owner = (self._name, self._number)
        return self._handler.recv(
            self._name, self._number, rank, like.shape, like.dtype, owner=owner, backward=backward
        )
