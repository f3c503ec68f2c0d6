"""The bytes that autograd holds for backward, each storage counted once while anything holds it."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class Held:
    """Held bytes of one rank, now and at their peak."""

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0
        self._storages: dict[int, list[int]] = {}  # address ▶ holders, bytes

    def add(self, tensor: Tensor) -> int:
        """Count the tensor's storage; returns its address, for `drop`."""
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
    """Saves tensors on the device and counts them, unless their address is in `permanent`.

    `permanent` are the storages of parameters, buffers and batch fields, which exist anyway.
    """

    def __init__(self, held: Held | None, permanent: Container[int]) -> None:
        self.held = held
        self.permanent = permanent

    def keep(self, tensor: Tensor) -> Hold:
        # Detached: a saved output would hold the node that saves it, and backward must read the weight version
        # of its forward, whatever the parameter points at meanwhile.
        counted = self.held is not None and address(tensor) not in self.permanent
        return Hold(tensor.detach(), self.held if counted else None)

    def saving(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self.keep, unpack)


def unpack(packed: Any) -> Tensor:
    """The tensor of a `Hold`, or of another object that autograd holds in place of a saved tensor."""
    return packed.tensor


def address(tensor: Any) -> int:
    """Of the storage; 0 where there is none."""
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
        return 0
    return tensor.untyped_storage().data_ptr()
