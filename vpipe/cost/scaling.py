"""A profile for minibatches of another size, or for a schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vpipe.cost.costs import BlockCost, Profile
from vpipe.cost.fields import file_fields


def for_batch_size(profile: Profile, batch_size: int) -> Profile:
    """The fields of blocks whose unit scales are taken in proportion to the samples."""
    if batch_size == profile.batch_size:
        return profile
    factor = batch_size / profile.batch_size
    blocks = []
    for block in profile.blocks:
        scaled: dict[str, Any] = {}
        for name, entry in file_fields(BlockCost).items():
            value = getattr(block, name)
            if entry.unit is not None and entry.unit.scales and value is not None:
                scaled[name] = round(value * factor) if entry.whole else value * factor
        blocks.append(replace(block, **scaled))
    return replace(profile, blocks=tuple(blocks), batch_size=batch_size)


def as_scheduled(profile: Profile, split: bool, update_interval: int) -> Profile:
    """The additional time of a backward in a schedule is added to the weight gradient; recomputing is chosen.

    All but the first minibatch of an update add to gradients: the time for that is divided among all of them.
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
