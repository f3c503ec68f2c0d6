"""The same profile for minibatches of another size."""

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
            kept_bytes=round(block.kept_bytes * factor),
            boundary_bytes=round(block.boundary_bytes * factor),
            deferred_bytes=None if block.deferred_bytes is None else round(block.deferred_bytes * factor),
        )
        for block in profile.blocks
    )
    return replace(profile, blocks=blocks, batch_size=batch_size)
