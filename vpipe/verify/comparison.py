"""How far two ways of training are apart: losses, gradients and weights, relative to the size of what is compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isnan

import torch
from torch import Tensor

StageTensor = tuple[int, str]  # stage, name
ByRank = Sequence[Mapping[StageTensor, Tensor]]
"""What each rank holds; of a parameter there may be several copies."""


@dataclass(frozen=True)
class Difference:
    """How far the two ways are apart, relative to the size of what is compared, and where."""

    largest: float
    where: str


def compare_losses(by_rank: Sequence[Sequence[float]], expected: Sequence[float]) -> Difference:
    worst = Difference(0.0, "")
    for rank, losses in enumerate(by_rank):
        for update, (ours, theirs) in enumerate(zip(losses, expected, strict=True)):
            relative = abs(ours - theirs) / (abs(theirs) or 1.0)
            relative = inf if isnan(relative) else relative
            if relative > worst.largest or not worst.where:
                worst = Difference(relative, f"update {update}, as rank {rank} was told it")
    return worst


def compare_gradients(by_rank: ByRank, expected: Mapping[str, Tensor]) -> Difference:
    """Relative to the tensor, or to a thousandth of the largest gradient: less than that is rounding."""
    found = {name for gradients in by_rank for _, name in gradients}
    for name in expected.keys() - found:
        if expected[name].count_nonzero():
            return Difference(inf, f"{name}, which has no gradient in the pipeline")
    largest = max((g.abs().max().item() for g in expected.values() if g.numel()), default=1.0)
    return _compare(by_rank, expected, 1e-3 * largest)


def compare_weights(by_rank: ByRank, expected: Mapping[str, Tensor], unsteady: Iterable[str]) -> Difference:
    """Of all but the `unsteady` parameters, which two correct runs need not have alike."""
    passed_over = set(unsteady)
    steady = [{p: t for p, t in weights.items() if p[1] not in passed_over} for weights in by_rank]
    return _compare(steady, expected, 0.01)


def largest_difference(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], scale: float = 0.01
) -> tuple[float, str]:
    """The largest difference relative to the tensor, and where it is; nan differs infinitely.

    A tensor that lies below `scale` throughout is compared with that.
    """
    worst = (0.0, "")
    for name, tensor in ours.items():
        if tensor.numel():
            difference = (tensor - theirs[name]).abs().max().item()
            relative = difference / max(theirs[name].abs().max().item(), scale)
            worst = max(worst, (inf if isnan(relative) else relative, name))
    return worst


def rounding_alone(gradients: Mapping[str, Tensor]) -> set[str]:
    """Parameters whose gradient is nothing but rounding: it lies below the last digit of the largest one.

    The bias of an attention's keys is the usual case. Adam divides such a gradient by its own size, so the
    weights of two correct runs need not agree there.
    """
    sizes = {name: g.abs().max().item() for name, g in gradients.items() if g.numel()}
    largest = max(sizes.values(), default=0.0)
    return {n for n, size in sizes.items() if 0 < size < largest * torch.finfo(gradients[n].dtype).eps}


def _compare(by_rank: ByRank, expected: Mapping[str, Tensor], scale: float) -> Difference:
    """Every copy that any rank holds; what the reference has no gradient for should be zero."""
    ours: dict[str, Tensor] = {}
    theirs: dict[str, Tensor] = {}
    for rank, tensors in enumerate(by_rank):
        for (stage, name), tensor in tensors.items():
            where = f"{name} (stage {stage}, rank {rank})"
            ours[where] = tensor
            theirs[where] = expected[name] if name in expected else torch.zeros_like(tensor)
    return Difference(*largest_difference(ours, theirs, scale))
