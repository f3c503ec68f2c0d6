"""Remedies for stale weights, as users name them: `staleness: [predict, {async_after: 100}]`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from vpipe.errors import VPipeError, meant

FLAGS = ("predict", "split_tied")
REMEDIES = (*FLAGS, "async_after")
Remedy = str | Mapping[str, int]


class Staleness(NamedTuple):
    """What an asynchronous run does about gradients that are some updates old. Synchronous schedules have none."""

    predict: bool = False
    """Forwards read the weights as they are expected to be when their gradients are applied."""
    async_after: int = 0
    """So many updates at the beginning are made one after the other, with an empty pipeline between them."""
    split_tied: bool = False
    """The last holder's part of a tied gradient is applied at once, the parts of the others when they have come."""


def read_staleness(remedies: Iterable[Remedy] | Staleness, place: str = "staleness") -> Staleness:
    """`place` begins error messages."""
    if isinstance(remedies, Staleness):
        return remedies
    if isinstance(remedies, str | Mapping):
        remedies = [remedies]
    found: dict[str, int | bool] = {}
    for remedy in remedies:
        pairs = remedy.items() if isinstance(remedy, Mapping) else [(remedy, None)]
        for name, number in pairs:
            if name not in REMEDIES:
                raise VPipeError(f"{place} has the unknown remedy {name!r}: {meant(str(name), REMEDIES)}")
            if name in found:
                raise VPipeError(f"{place} has {name} twice: give it once")
            if name in FLAGS and number is not None:
                raise VPipeError(f"{place} has {name}: {number!r}: it takes no number, write {name} alone")
            if name == "async_after" and (type(number) is not int or number < 0):
                raise VPipeError(
                    f"{place} has async_after: {number!r}: give a number of updates, e.g. {{async_after: 100}}"
                )
            found[name] = True if number is None else number
    return Staleness(**found)  # type: ignore[arg-type]
