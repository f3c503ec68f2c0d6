"""Weight versions: storage that parameters are pointed at.

A version is one flat tensor for each dtype, with the parameters as views of it. Making a version is one
copy of the flat tensors; switching to one is `p.data = view` and copies nothing. Storage is recycled, so
the steady state allocates nothing.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors

ALIGNMENT = 64
"""Tensors begin at multiples of so many bytes: kernels read others in smaller pieces, or copy them first."""
PADDING = torch.empty(ALIGNMENT)


@dataclass
class Version:
    number: int
    flats: list[Tensor]
    tensors: list[Tensor]
    users: int = 0  # minibatches whose backward will read it


class VersionStore:
    """Makes versions for a list of parameters and recycles their storage."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._spare: list[Version] = []

    def reserve(self, count: int) -> None:
        """Allocate storage for more versions, before activations fragment the memory."""
        self._spare += [self._new(0) for _ in range(count - len(self._spare))]

    def first(self, values: Sequence[Tensor]) -> Version:
        version = self._new(0)
        for target, value in zip(version.tensors, values, strict=True):
            target.copy_(value)
        return version

    def blank(self, number: int) -> Version:
        """Storage for the next version, not initialised."""
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
        return Version(number, *flat_tensors(self._parameters))


def flat_tensors(like: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """A flat tensor for each dtype, not initialised, and views of them with these tensors' shapes."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = defaultdict(list)
    for number, tensor in enumerate(like):
        kinds[tensor.dtype, tensor.device].append(number)
    flats, views = [], list(like)
    for (dtype, device), numbers in kinds.items():
        grain = ALIGNMENT // dtype.itemsize
        pieces: list[Tensor] = []  # the tensors, each padded to the next multiple
        places = []
        for number in numbers:
            places.append(len(pieces))
            pieces.append(like[number])
            if rest := -like[number].numel() % grain:
                pieces.append(PADDING[:rest])
        flat = torch.empty(sum(piece.numel() for piece in pieces), dtype=dtype, device=device)
        made = _unflatten_dense_tensors(flat, pieces)  # one call: the host must not delay the GPU
        for number, place in zip(numbers, places, strict=True):
            # An empty tensor comes back without its shape.
            views[number] = made[place] if like[number].numel() else made[place].view(like[number].shape)
        flats.append(flat)
    return flats, views
