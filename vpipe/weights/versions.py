"""Weight versions: storage that parameters are pointed at.

A version is one flat tensor for each dtype, with the parameters as views of it. Making a version is one
copy of the flat tensors; switching to one is `p.data = view` and copies nothing. Storage is recycled, so
the steady state allocates nothing.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

ALIGNMENT = 64
"""Tensors begin at multiples of so many bytes: kernels read others in smaller pieces, or copy them first."""
PADDING = torch.empty(ALIGNMENT)


@dataclass
class Version:
    number: int  # updates made before it
    flats: list[Tensor]
    tensors: list[Tensor]
    users: int = 0  # minibatches whose backward will read it
    ahead: int = 0  # updates that are predicted on top of those made

    def __str__(self) -> str:
        return f"{self.number}+{self.ahead}" if self.ahead else str(self.number)


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
