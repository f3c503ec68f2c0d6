"""The weight of a minibatch in its update's loss: its samples, its target tokens, or a function of the user's."""

from __future__ import annotations

from collections.abc import Callable

from vpipe.errors import VPipeError, meant
from vpipe.graph import ModelGraph, target_count
from vpipe.runtime import Fields, count_labels, count_samples

LossWeight = Callable[[Fields], float]
NAMES = ("samples", "tokens", "auto")


def is_cross_entropy(graph: ModelGraph) -> bool:
    """Whether the loss is a mean of cross-entropies over targets of the batch, and nothing else."""
    return target_count(graph) is not None


def loss_weigher(given: str | LossWeight, graph: ModelGraph) -> LossWeight:
    """The function that a value of `loss_weight=` names."""
    if callable(given):
        return given
    if given not in NAMES:
        raise VPipeError(
            f"loss_weight is {given!r}: {meant(str(given), NAMES)}, or give a function of the fields"
        )
    if given == "samples":
        return count_samples
    count = target_count(graph)
    if count is None and given == "auto":
        return count_labels
    if count is None:
        raise VPipeError(
            "loss_weight is 'tokens', but the loss is not one mean of cross-entropies over targets of the batch: give "
            "a function from the batch's fields to the number that the loss is a mean over"
        )

    def weigh(fields: Fields) -> float:
        targets = count(fields)
        if not targets:
            raise VPipeError(
                "a minibatch has no target token, so its loss is not a number: leave out samples whose labels are all "
                "ignored, or give larger minibatches"
            )
        return float(targets)

    return weigh
