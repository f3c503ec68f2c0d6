"""Differences between two ways of training: of losses, gradients and weights, relative to their size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isnan

import torch
from torch import Tensor

StageTensor = tuple[int, str]  # stage, name
ByRank = Sequence[Mapping[StageTensor, Tensor]]
"""The tensors of each rank; several ranks may hold a copy of one parameter."""


@dataclass(frozen=True)
class Difference:
    """The largest relative difference, and where it is."""

    largest: float
    where: str


def compare_losses(by_rank: Sequence[Sequence[float]], expected: Sequence[float]) -> Difference:
    worst = Difference(0.0, "")
    for rank, losses in enumerate(by_rank):
        for update, (ours, theirs) in enumerate(zip(losses, expected, strict=True)):
            relative = abs(ours - theirs) / (abs(theirs) or 1.0)
            relative = inf if isnan(relative) else relative
            if relative > worst.largest or not worst.where:
                worst = Difference(relative, f"update {update}, on rank {rank}")
    return worst


def compare_gradients(by_rank: ByRank, expected: Mapping[str, Tensor]) -> Difference:
    """Relative to the tensor's size, or to a thousandth of the largest gradient if that is more: below is rounding."""
    found = {name for gradients in by_rank for _, name in gradients}
    for name in expected.keys() - found:
        if expected[name].count_nonzero():
            return Difference(inf, f"{name}, which has no gradient in the pipeline")
    largest = max((g.abs().max().item() for g in expected.values() if g.numel()), default=1.0)
    return _compare(by_rank, expected, 1e-3 * largest)


def compare_weights(by_rank: ByRank, expected: Mapping[str, Tensor], unsteady: Iterable[str]) -> Difference:
    """Of all but the `unsteady` parameters, in which two correct runs may differ."""
    left_out = set(unsteady)
    steady = [{p: t for p, t in weights.items() if p[1] not in left_out} for weights in by_rank]
    return _compare(steady, expected, 0.01)


def largest_difference(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], scale: float = 0.01
) -> tuple[float, str]:
    """The largest difference relative to the tensor's size, or to `scale` if that is more, and its name.

    The difference of nan is infinite.
    """
    worst = (0.0, "")
    for name, tensor in ours.items():
        if tensor.numel():
            difference = (tensor - theirs[name]).abs().max().item()
            relative = difference / max(theirs[name].abs().max().item(), scale)
            worst = max(worst, (inf if isnan(relative) else relative, name))
    return worst


def rounding_alone(gradients: Mapping[str, Tensor]) -> set[str]:
    """Parameters whose gradient is rounding error only: it is below the last digit of the largest gradient.

    The bias of an attention's keys is the usual case. Adam divides such a gradient by its own size, so the
    weights of two correct runs may differ there.
    """
    sizes = {name: g.abs().max().item() for name, g in gradients.items() if g.numel()}
    largest = max(sizes.values(), default=0.0)
    return {n for n, size in sizes.items() if 0 < size < largest * torch.finfo(gradients[n].dtype).eps}


def _compare(by_rank: ByRank, expected: Mapping[str, Tensor], scale: float) -> Difference:
    """Compare every copy of every rank, on the host; a gradient that the reference does not have should be zero."""
    ours: dict[str, Tensor] = {}
    theirs: dict[str, Tensor] = {}
    for rank, tensors in enumerate(by_rank):
        for (stage, name), tensor in tensors.items():
            where = f"{name} (stage {stage}, rank {rank})"
            ours[where] = tensor
            theirs[where] = expected[name].cpu() if name in expected else torch.zeros_like(tensor)
    return Difference(*largest_difference(ours, theirs, scale))
