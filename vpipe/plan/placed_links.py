"""The links of a placed pipeline, as sums that bound its time: messages across each cut, and what each card carries."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from math import lcm
from typing import NamedTuple

import numpy as np

from vpipe.cost import LinkCost, Profile
from vpipe.plan.sums import Floats
from vpipe.schedule.program import Placement
from vpipe.simulate.network import reduction

MANY = 2.0**40
"""Bytes: of one byte alone a latency would leave nothing."""


class CutLink(NamedTuple):
    """The link across a cut, both ways: what a message takes at least."""

    latency: float
    byte: float
    """Seconds."""
    busy: bool
    """Whether it is the sender's work."""
    held: tuple[tuple[float, float, float], ...]
    """Lines in one direction: their share of the messages, how long a message holds them, and for each byte."""


class StageReduction(NamedTuple):
    """What adding up gradients takes: seconds, and seconds for each byte of them."""

    near: tuple[float, float] = (0.0, 0.0)
    """A rank's own time."""
    latency: float = 0.0
    far: float = 0.0
    """A byte over the network, for the rank that sends least."""
    card: float = 0.0
    """For all ranks of a host together."""


class PlacedLinks(NamedTuple):
    cuts: tuple[CutLink, ...]
    cards: Floats
    """By card (out of a host, or into it) and cut: seconds for each byte that crosses the cut, of one minibatch (on
    average, or at least)."""
    reductions: tuple[StageReduction, ...]
    """Of each stage."""
    reduced: Floats
    """By card and stage: seconds for each byte of gradients, of one update."""


NO_REDUCTION = StageReduction()


def placed_links(profile: Profile, placement: Placement, minibatches: int | None) -> PlacedLinks:
    """`placement`: the ranks of each stage; `minibatches`: of a synchronous update, None: endless."""
    stages = len(placement)
    cards: dict[tuple[bool, int], Floats] = defaultdict(lambda: np.zeros(max(0, stages - 1)))
    reduced: dict[tuple[bool, int], Floats] = defaultdict(lambda: np.zeros(stages))
    cuts = []
    for cut in range(stages - 1):
        here, there = placement[cut], placement[cut + 1]
        period = lcm(len(here), len(there))
        seen: list[LinkCost] = []
        lines: dict[tuple[int, ...], tuple[float, float, float]] = {}
        for phase in range(period):
            share = 1 / period
            if minibatches is not None:
                share = len(range(phase, minibatches, period)) / minibatches
            one, other = here[phase % len(here)], there[phase % len(there)]
            for sender, receiver in ((one, other), (other, one)):
                link = profile.link_between(sender, receiver)
                if sender == receiver:
                    seen.append(LinkCost(np.inf))
                    continue
                seen.append(link)
                byte = 1 / link.bandwidth
                out, into = profile.host_of(sender), profile.host_of(receiver)
                if out != into:
                    cards[False, out][cut] += share * byte
                    cards[True, into][cut] += share * byte
                    line = (-1 - out, sender == one)
                    lines[line] = (
                        lines.get(line, (0.0,))[0] + share,
                        0.0,
                        min(byte, lines.get(line, (0, 0, byte))[2]),
                    )
                elif not link.sender_busy:
                    lines[sender, receiver] = (share, link.latency, byte)
        cuts.append(_cut(seen, tuple(set(lines.values()))))
    reductions = []
    for stage, ranks in enumerate(placement):
        if len(ranks) == 1:
            reductions.append(NO_REDUCTION)
            continue
        fixed = [reduction(profile, ranks, rank, 0) for rank in ranks]
        whole = [reduction(profile, ranks, rank, MANY) for rank in ranks]
        near = max(one.seconds for one in fixed)
        network = [one.route.seconds / MANY for one in whole]
        for rank, byte in zip(ranks, network, strict=True):
            for into in (False, True):
                reduced[into, profile.host_of(rank)][stage] += byte
        reductions.append(
            StageReduction(
                (near, (max(one.seconds for one in whole) - near) / MANY),
                min(one.route.latency for one in fixed),
                min(network),
                max(reduced[False, profile.host_of(rank)][stage] for rank in ranks),
            )
        )
    used = sorted({*cards, *reduced})
    return PlacedLinks(
        tuple(cuts),
        np.array([cards[card] for card in used]).reshape(len(used), max(0, stages - 1)),
        tuple(reductions),
        np.array([reduced[card] for card in used]).reshape(len(used), stages),
    )


def any_links(profile: Profile, replicas: Sequence[int]) -> PlacedLinks:
    """Those of any placement: the fastest link across every cut, on as many lines as there may be."""
    links = [profile.link, *profile.links.values()]
    if profile.hosts is not None:
        links += [profile.hosts.link, *profile.hosts.links.values()]
    byte = min(1 / link.bandwidth for link in links)
    cuts = []
    for here, there in pairwise(replicas):
        cut = _cut(links, ())
        held = () if any(link.sender_busy for link in links) else ((1 / lcm(here, there), 0.0, byte),)
        cuts.append(cut._replace(held=held))
    none = np.zeros((0, 0))
    stages = len(replicas)
    return PlacedLinks(
        tuple(cuts), none.reshape(0, stages - 1), (NO_REDUCTION,) * stages, none.reshape(0, stages)
    )


def _cut(links: Sequence[LinkCost], held: tuple[tuple[float, float, float], ...]) -> CutLink:
    busy = {link.sender_busy for link in links}
    if len(busy) > 1:  # some messages are the sender's work, some are not
        return CutLink(0.0, 0.0, False, held)
    return CutLink(
        min(link.latency for link in links), min(1 / link.bandwidth for link in links), busy == {True}, held
    )
