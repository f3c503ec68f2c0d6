"""A profile for minibatches of another size, or for a schedule.

A figure of a block is a line between the sizes that were measured, and goes on beyond them:

    seconds, bytes              ·     beyond the largest: along the last piece
                           ●
                      ○               ○ other_sizes, ● batch_size
                 ○
            ·                         below the smallest: along the first piece
    ────────────────────────────
                       samples        what is there at any size (a weight's gradient, the host's launches) is not scaled
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from vpipe.cost.costs import BlockCost, HostCost, OtherSize, Profile
from vpipe.cost.fields import file_fields

Point = tuple[int, float]
"""A batch size, and the figure that was measured with it."""


def for_batch_size(profile: Profile, batch_size: int) -> Profile:
    """The fields of blocks whose unit scales, and the overhead of the device, for minibatches of so many samples.

    Of a profile with one size they are in proportion to the samples.
    """
    if batch_size == profile.batch_size:
        return profile
    own = OtherSize(profile.batch_size, profile.blocks, profile.device.overhead)
    measured = sorted((own, *profile.other_sizes), key=lambda each: each.batch_size)
    sizes = [each.batch_size for each in measured]
    blocks = []
    for block, *same in zip(profile.blocks, *(each.blocks for each in measured), strict=True):
        scaled: dict[str, Any] = {}
        for name, entry in file_fields(BlockCost).items():
            if entry.unit is None or not entry.unit.scales or getattr(block, name) is None:
                continue
            figures = zip(sizes, (getattr(each, name) for each in same), strict=True)
            value = _at(batch_size, [(size, figure) for size, figure in figures if figure is not None])
            scaled[name] = round(value) if entry.whole else value
        blocks.append(replace(block, **scaled))
    nearest = min(max(batch_size, sizes[0]), sizes[-1])
    overhead = _between(nearest, [(each.batch_size, each.overhead) for each in measured])
    return replace(
        profile,
        blocks=tuple(blocks),
        device=replace(profile.device, overhead=overhead),
        batch_size=batch_size,
        other_sizes=tuple(each for each in measured if each.batch_size != batch_size),
    )


def _at(size: int, points: Sequence[Point]) -> float:
    """The figure at this size. Beyond the points neither its fixed part nor its part a sample is negative."""
    if points[0][0] <= size <= points[-1][0]:
        return _between(size, points)
    end, other = (points[0], points[1:2]) if size < points[0][0] else (points[-1], points[-2:-1])
    slope = proportional = end[1] / end[0]
    for near in other:
        slope = min(max(0.0, (near[1] - end[1]) / (near[0] - end[0])), proportional)
    return end[1] + slope * (size - end[0])


def _between(size: int, points: Sequence[Point]) -> float:
    for (low, first), (high, second) in pairwise(points):
        if low <= size <= high:
            return first + (second - first) * (size - low) / (high - low)
    return points[0][1]


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
            host=_host_as_scheduled(block.host, split),
        )
        for block in profile.blocks
    )
    return replace(profile, blocks=blocks)


def _host_as_scheduled(host: HostCost | None, split: bool) -> HostCost | None:
    if host is None:
        return None
    return replace(host, minibatch=host.minibatch + (host.splitting if split else 0.0), splitting=0.0)
