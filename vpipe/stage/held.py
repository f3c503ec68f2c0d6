"""The bytes that autograd holds for backward: each storage once, for as long as anything holds it."""

from __future__ import annotations

from collections.abc import Container
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class Held:
    """The count of one rank, now and at its peak."""

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0
        self._storages: dict[int, list[int]] = {}  # address ▶ how many hold it, its bytes

    def add(self, tensor: Tensor) -> int:
        """Count the tensor's storage; returns what `drop` takes."""
        where = address(tensor)
        if where in self._storages:
            self._storages[where][0] += 1
        elif where:
            size = tensor.untyped_storage().nbytes()
            self._storages[where] = [1, size]
            self.now += size
            self.peak = max(self.peak, self.now)
        return where

    def drop(self, where: int) -> None:
        if where:
            holders = self._storages[where]
            holders[0] -= 1
            if not holders[0]:
                self.now -= holders[1]
                del self._storages[where]


class Packed(Protocol):
    """What autograd holds in place of a saved tensor."""

    @property
    def tensor(self) -> Tensor: ...


class Hold:
    """A tensor, counted while this object lives."""

    __slots__ = ("_held", "_where", "tensor")

    def __init__(self, tensor: Tensor, held: Held | None) -> None:
        self.tensor = tensor
        self._held = held
        self._where = 0 if held is None else held.add(tensor)

    def __del__(self) -> None:
        if self._held is not None:
            self._held.drop(self._where)


class HeldSaver:
    """How one forward's tensors are saved as they are: counted, unless they are `outside`.

    Outside are the addresses of parameters, buffers and fields of the batch, which are there anyway.
    """

    def __init__(self, held: Held | None, outside: Container[int]) -> None:
        self.held = held
        self.outside = outside

    def keep(self, tensor: Tensor) -> Hold:
        # Detached: a saved output would hold the node that saves it. Parameters too: a minibatch's backward
        # reads the version that its forward read, whatever the parameter points at meanwhile.
        counted = self.held is not None and address(tensor) not in self.outside
        return Hold(tensor.detach(), self.held if counted else None)

    def saving(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self.keep, unpack)


def unpack(packed: Packed) -> Tensor:
    return packed.tensor


def address(tensor: Any) -> int:
    """Where the storage lies; 0 for what has none of its own."""
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
        return 0
    return tensor.untyped_storage().data_ptr()
