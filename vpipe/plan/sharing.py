"""The link to the host that several ranks share: it carries what all of them swap, one copy at a time.

For each minibatch of the pipeline it is busy for the sum of what its ranks copy, replicas each for its turn. No rank
that swaps can be quicker than that: n ranks that swap all the time have an n-th part of the link each, one that swaps
alone has all of it.

The sum couples stages that the search takes one by one. So it searches as if each rank had a link of its own; if that
costs nothing, nothing is better. Otherwise it searches again with an n-th part of the link for each rank, where n is
2, 4, 8, ... and as many as share it: within its part a rank never waits for another. The fastest of these, by the
sums, is taken: it may not be the fastest that there is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from vpipe.cost import Profile
from vpipe.plan.model import Time


def shared_times(profile: Profile, ranks: Sequence[tuple[int, ...]], times: Sequence[Time]) -> list[Time]:
    """The times of all positions with those of the others that copy over the same links."""
    together = profile.device.shared_by
    carried: dict[int, float] = {}
    for own, time in zip(ranks, times, strict=True):
        for rank in own:
            link = rank // together
            carried[link] = carried.get(link, 0.0) + time.host / len(own)
    return [
        time._replace(host=len(own) * max(carried[rank // together] for rank in own)) if time.host else time
        for own, time in zip(ranks, times, strict=True)
    ]


def with_parts_of_the_link(profile: Profile) -> Iterator[Profile]:
    """The profile with a 2nd, 4th, 8th, ... part of the link to the host for each rank."""
    together, part = profile.device.shared_by, 1
    while part < together:
        part = min(2 * part, together)
        device = profile.device
        yield replace(
            profile,
            device=replace(
                device, to_host=device.to_host / part, from_host=device.from_host / part, shared_by=1
            ),
        )
