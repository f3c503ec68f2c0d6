"""Weight versions: storage that parameters are pointed at.

A version is one flat tensor for each dtype, and the parameters' shapes as views of it. Making a version
is one copy of the flat tensors; switching to one is `p.data = view` and copies nothing. The storage of a
version that died is used again, so that the steady state allocates nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

ALIGNMENT = 64
"""Bytes at whose multiples tensors begin: elsewhere kernels read them in smaller pieces, or copy them first."""


@dataclass
class Version:
    number: int
    flats: list[Tensor]
    tensors: list[Tensor]
    users: int = 0  # minibatches whose backward will read it


class VersionStore:
    """Makes versions for a list of parameters and recycles their storage."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._shapes = [(p.shape, p.dtype, p.device) for p in parameters]
        self._spare: list[Version] = []

    def reserve(self, count: int) -> None:
        """Storage for so many versions more, before activations divide the memory into pieces."""
        self._spare += [self._new(0) for _ in range(count - len(self._spare))]

    def first(self, values: Sequence[Tensor]) -> Version:
        version = self._new(0)
        for target, value in zip(version.tensors, values, strict=True):
            target.copy_(value)
        return version

    def blank(self, number: int) -> Version:
        """Storage for the next version, with anything in it."""
        if not self._spare:
            return self._new(number)
        version = self._spare.pop()
        version.number = number
        return version

    def copy(self, source: Version, number: int) -> Version:
        version = self.blank(number)
        for target, flat in zip(version.flats, source.flats, strict=True):
            target.copy_(flat)
        return version

    def recycle(self, version: Version) -> None:
        self._spare.append(version)

    def _new(self, number: int) -> Version:
        return Version(number, *flat_tensors(self._shapes))


def flat_tensors(
    shapes: Sequence[tuple[torch.Size, torch.dtype, torch.device]],
) -> tuple[list[Tensor], list[Tensor]]:
    """A flat tensor for each dtype, with anything in it, and a view for each of the shapes."""
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    starts = []
    for shape, dtype, device in shapes:
        grain = ALIGNMENT // dtype.itemsize
        starts.append(sizes.get((dtype, device), 0))
        sizes[dtype, device] = starts[-1] + -(-shape.numel() // grain) * grain
    flats = {k: torch.empty(n, dtype=k[0], device=k[1]) for k, n in sizes.items()}
    tensors = []
    for (shape, dtype, device), start in zip(shapes, starts, strict=True):
        tensors.append(flats[dtype, device][start : start + shape.numel()].view(shape))
    return list(flats.values()), tensors
