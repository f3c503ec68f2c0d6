"""The same profile for minibatches of another size, or for a schedule."""

from __future__ import annotations

from dataclasses import replace

from vpipe.cost.costs import Profile


def for_batch_size(profile: Profile, batch_size: int) -> Profile:
    """Times of blocks, and bytes kept and sent, grow with the number of samples; updates and weights do not."""
    if batch_size == profile.batch_size:
        return profile
    factor = batch_size / profile.batch_size
    blocks = tuple(
        replace(
            block,
            forward=block.forward * factor,
            input_gradient=block.input_gradient * factor,
            weight_gradient=block.weight_gradient * factor,
            recomputing=_scaled(block.recomputing, factor),
            split_recomputing=_scaled(block.split_recomputing, factor),
            splitting=block.splitting * factor,  # accumulating and swapping do not depend on the samples
            kept_bytes=round(block.kept_bytes * factor),
            boundary_bytes=round(block.boundary_bytes * factor),
            working_bytes=round(block.working_bytes * factor),
            forward_bytes=round(block.forward_bytes * factor),
            deferred_bytes=None if block.deferred_bytes is None else round(block.deferred_bytes * factor),
        )
        for block in profile.blocks
    )
    return replace(profile, blocks=blocks, batch_size=batch_size)


def as_scheduled(profile: Profile, split: bool, update_interval: int) -> Profile:
    """With what backward takes more in a schedule, counted with the weight gradient, and recomputing as it is there.

    All but the first minibatch of an update add to gradients: each gets its share of that.
    """
    adding = 1 - 1 / update_interval
    blocks = tuple(
        replace(
            block,
            weight_gradient=block.weight_gradient
            + (block.splitting if split else 0.0)
            + block.accumulating * adding,
            splitting=0.0,
            accumulating=0.0,
            recomputing=block.split_recomputing
            if split and block.split_recomputing is not None
            else block.recomputing,
            split_recomputing=None,
        )
        for block in profile.blocks
    )
    return replace(profile, blocks=blocks)


def _scaled(seconds: float | None, factor: float) -> float | None:
    return None if seconds is None else seconds * factor
