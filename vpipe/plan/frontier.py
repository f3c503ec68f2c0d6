"""The policies of a stage that are worth a simulation: none takes longer and copies more than another.

What a simulation reads of a stage's policies are the seconds that they add and the bytes that they copy to the host.
(The host's time to launch them is not compared: like the seconds, it grows with what is recomputed or swapped.)
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from vpipe.cost import KEEP, POLICIES, Profile, input_bytes
from vpipe.plan.choice import choose, fixed_bytes, from_the_end
from vpipe.plan.model import Slice, StageMemory, stage_memory

FEW = 9
"""So many blocks are enumerated."""
CHECKS = 2000
"""Sets of policies whose memory is computed, of one slice."""
NEVER = 1e6
"""Seconds that swapping would take."""


class PolicyChoice(NamedTuple):
    longer: float
    """Seconds of a minibatch that the policies add."""
    copied: int
    """Bytes that go to the host."""
    policies: list[str]
    memory: StageMemory


def policy_choices(profile: Profile, piece: Slice, memory: int) -> list[PolicyChoice]:
    """Those that fit, the quickest first; empty if nothing does."""
    keeping = [KEEP] * (piece.stop - piece.start)
    if (held := stage_memory(profile, [piece], [keeping])).total <= memory:
        return [PolicyChoice(0.0, 0, keeping, held)]
    if fixed_bytes(profile, [piece]) > memory:
        return []
    few = len(keeping) <= FEW
    return _enumerated(profile, piece, memory) if few else _chosen(profile, piece, memory)


def _enumerated(profile: Profile, piece: Slice, memory: int) -> list[PolicyChoice]:
    blocks, names = range(piece.start, piece.stop), list(POLICIES)
    numbers = np.indices((len(names),) * len(blocks), dtype=np.int8).reshape(len(blocks), -1)
    longer, copied, held = (np.zeros(numbers.shape[1]) for _ in range(3))
    for number, chosen in zip(blocks, numbers, strict=True):
        block, entered = profile.blocks[number], input_bytes(profile.blocks, number)
        options = [POLICIES[name] for name in names]
        longer += np.array([policy.seconds(block) for policy in options])[chosen]
        copied += np.array([policy.copied(block) for policy in options])[chosen]
        in_flight = [policy.minibatches(profile.device, piece.load.in_flight) for policy in options]
        sizes = [
            policy.held(block, entered) * count for policy, count in zip(options, in_flight, strict=True)
        ]
        held += np.array(sizes, dtype=float)[chosen]
    fits = np.flatnonzero(held + fixed_bytes(profile, [piece]) <= memory)
    order = fits[np.lexsort((copied[fits], longer[fits]))]
    found: list[PolicyChoice] = []
    least, left = np.inf, CHECKS
    for place in order:
        if copied[place] >= least or not left:
            continue
        left -= 1
        policies = [names[number] for number in numbers[:, place]]
        needs = stage_memory(profile, [piece], [policies])
        if needs.total <= memory:
            least = copied[place]
            found.append(PolicyChoice(float(longer[place]), int(least), policies, needs))
            if not least:
                break
    return [_from_the_end(profile, piece, choice, memory) for choice in found]


def _chosen(profile: Profile, piece: Slice, memory: int) -> list[PolicyChoice]:
    """The quickest by sums, and the quickest without the host."""
    without = replace(profile, blocks=tuple(replace(block, swapping=NEVER) for block in profile.blocks))
    found = []
    for costs in (profile, without):
        if (best := choose(costs, [piece], memory)) is not None:
            choice = policy_choice(profile, piece, best[1][0], memory)
            if costs is profile or not choice.copied:
                found.append(choice)
            if not choice.copied:
                break
    return sorted(found, key=lambda choice: choice[:2])


def policy_choice(profile: Profile, piece: Slice, policies: list[str], memory: int) -> PolicyChoice:
    blocks = profile.blocks[piece.start : piece.stop]
    longer = sum(POLICIES[name].seconds(block) for block, name in zip(blocks, policies, strict=True))
    copied = sum(POLICIES[name].copied(block) for block, name in zip(blocks, policies, strict=True))
    choice = PolicyChoice(longer, copied, policies, stage_memory(profile, [piece], [policies]))
    return _from_the_end(profile, piece, choice, memory)


def _from_the_end(profile: Profile, piece: Slice, choice: PolicyChoice, memory: int) -> PolicyChoice:
    """The same with the guides' shape, where that costs nothing."""
    if choice.copied:
        return choice
    policies = from_the_end(profile, piece, choice.policies, memory)
    blocks = profile.blocks[piece.start : piece.stop]
    longer = sum(POLICIES[name].seconds(block) for block, name in zip(blocks, policies, strict=True))
    if longer > choice.longer:
        return choice
    return PolicyChoice(longer, 0, policies, stage_memory(profile, [piece], [policies]))
