"""Recomputation: a block runs again when backward first reads a tensor that its forward did not keep.

    forward    every tensor that autograd would save becomes an empty slot
    backward   the first slot that is read runs the block again, up to its last save, and fills all slots

The second run draws the same random numbers (each block seeds its generators), reads the parameters' current values
(backward has set them to the forward's version), and gets copies of mutable buffers as the forward found them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from vpipe.graph.trace import Input
from vpipe.stage.held import HeldSaver, Hold
from vpipe.stage.random import RandomContext
from vpipe.stage.segment import Segment


class _SavedSlot:
    """Stands for a saved tensor. Dies with the autograd node that saved it, and so does the tensor."""

    __slots__ = ("__weakref__", "hold")

    def __init__(self) -> None:
        self.hold: Hold | None = None


class _AllFilled(Exception):
    """The rest of the block need not run."""


class _Recomputation:
    """The second run of one segment for one minibatch."""

    def __init__(
        self, segment: Segment, context: RandomContext, arguments: Sequence[Any], saver: HeldSaver
    ) -> None:
        self._function = segment.function.forward
        self._context = context
        self._saver = saver
        self._arguments = list(arguments)
        for position in segment.mutated:
            self._arguments[position] = arguments[position].clone()
        # Values of earlier blocks and stages: argument, tensor, whether it has a gradient, autograd's version of it.
        self._values: list[tuple[int, Hold, bool, int]] = []
        for position, (origin, value) in enumerate(zip(segment.inputs, arguments, strict=True)):
            if not isinstance(origin, Input) and isinstance(value, Tensor):
                self._values.append((position, saver.keep(value), value.requires_grad, value._version))
                self._arguments[position] = None
        self._slots: list[ref[_SavedSlot]] = []

    def pack(self, tensor: Tensor) -> _SavedSlot:
        slot = _SavedSlot()
        self._slots.append(ref(slot))
        return slot

    def unpack(self, slot: _SavedSlot) -> Tensor:
        if slot.hold is None:
            self._run()
        assert slot.hold is not None, "a block saved less when it ran again"
        return slot.hold.tensor

    def _run(self) -> None:
        for position, hold, graded, version in self._values:
            assert hold.tensor._version == version, "a block's input changed before it ran again"
            self._arguments[position] = hold.tensor.detach().requires_grad_(graded)
        filled = 0

        def fill(tensor: Tensor) -> None:
            nonlocal filled
            slot = self._slots[filled]()
            if slot is not None:
                slot.hold = self._saver.keep(tensor)
            filled += 1
            if filled == len(self._slots):
                raise _AllFilled

        def never(packed: None) -> Tensor:
            raise AssertionError("the second run has no backward")

        try:
            with torch.enable_grad(), saved_tensors_hooks(fill, never):
                self._function(self._context, *self._arguments)
        except _AllFilled:
            pass
        self._arguments.clear()
        self._values.clear()


def run_recomputed(
    segment: Segment, context: RandomContext, arguments: Sequence[Any], saver: HeldSaver
) -> tuple[Tensor, ...]:
    """Run the segment without keeping what its backward reads."""
    again = _Recomputation(segment, context, arguments, saver)
    with context.temporary_memory(), saved_tensors_hooks(again.pack, again.unpack):
        made = segment.function.forward(context, *arguments)
    return context.keep_outputs(made)
