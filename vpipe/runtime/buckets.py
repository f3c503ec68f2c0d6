"""The buckets of gradients of one replicated stage: each is summed when its last gradient is there.

    backward of the last minibatch      block 3  block 2  block 1  block 0   REDUCE        STEP
    bucket 0 (blocks 3 and 2)                            begins ---------------------- finishes
    bucket 1 (blocks 1 and 0)                                              begins ---- finishes

All replicas begin them in this order: a collective has no tag. What has not begun by REDUCE begins there: gradients of
stages that are replayed as CUDA graphs, and of parameters that get none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from vpipe.communication import AllReduce

Parameters = list[torch.nn.Parameter]
MOST_BUCKETS = 8
"""Of a stage."""
BUCKET = 4 * 2**20
"""Bytes from which gradients are worth a second bucket."""


class StageBuckets:
    def __init__(self, parameters: Parameters, begin: Callable[[int, int, Tensor], AllReduce]) -> None:
        """`begin` starts a sum: of an update, of a bucket, of these numbers."""
        self.buckets = make_buckets(parameters)
        self._begin = begin
        self._bucket_of = {id(p): number for number, bucket in enumerate(self.buckets) for p in bucket}
        self._missing: list[set[int]] = []  # by bucket, the parameters whose gradients are not complete
        self._update = 0
        self._sums: dict[int, list[AllReduce]] = {}  # of each update, those that have begun

    def await_gradients(self, update: int) -> None:
        """The last backward of this rank for an update comes next."""
        self._update = update
        self._missing = [set(map(id, bucket)) for bucket in self.buckets]

    def ready(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """The gradients of these parameters are complete."""
        for parameter in parameters:
            if (number := self._bucket_of.get(id(parameter))) is not None:
                self._missing[number].discard(id(parameter))
        begun = len(self._sums.get(self._update, ()))
        for missing in self._missing[begun:]:
            if missing:
                break
            self._begin_next(self._update)

    def begin_all(self, update: int) -> None:
        sums = self._sums.setdefault(update, [])
        while len(sums) < len(self.buckets):
            self._begin_next(update)

    def finish(self, update: int) -> None:
        """Replace the gradients by their sums."""
        for parameters, reduction in zip(self.buckets, self._sums.pop(update), strict=True):
            total = reduction.finish()
            for parameter, part in zip(parameters, total.split([p.numel() for p in parameters]), strict=True):
                parameter.grad = part.view_as(parameter).to(parameter.dtype)

    def unfinished(self) -> list[int]:
        return list(self._sums)

    def _begin_next(self, update: int) -> None:
        """A bucket frees the gradients that it copies: both are there of one bucket at a time."""
        sums = self._sums.setdefault(update, [])
        parameters = self.buckets[len(sums)]
        flat = torch.cat([_gradient_of(parameter).reshape(-1) for parameter in parameters])
        for parameter in parameters:
            parameter.grad = None
        sums.append(self._begin(update, len(sums), flat))


def make_buckets(parameters: Parameters) -> list[Parameters]:
    """Consecutive parameters, in a few buckets, the last ones first: the same on all replicas."""
    total = sum(parameter.nbytes for parameter in parameters)
    size = max(BUCKET, -(-total // MOST_BUCKETS))
    found: list[Parameters] = []
    filled = 0
    for parameter in reversed(parameters):
        bucket = filled // size
        while len(found) <= bucket:
            found.append([])
        found[bucket].append(parameter)
        filled += parameter.nbytes
    return [bucket for bucket in found if bucket]


def _gradient_of(parameter: torch.nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
