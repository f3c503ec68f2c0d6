"""The options of a block: what each memory policy holds, gives back and costs; equal blocks make one group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from vpipe.cost import KEEP, POLICIES, Profile, input_bytes
from vpipe.plan.model import Slice, host_bandwidth

Policies = list[list[str]]
"""By slice and block."""


class Option(NamedTuple):
    """One policy for one block."""

    policy: str
    held: int
    """Bytes of all minibatches on the device."""
    saved: int
    """Bytes less than keeping holds."""
    given_back: int
    """By a backward when it is through with the block, less what that leaves."""
    rebuilt: int
    """Bytes that backward makes again."""
    running: int
    """Bytes while the block's backward runs, beyond what it held of that minibatch."""
    seconds: float
    copied: int
    copying: float
    """Seconds of the host link."""


class BlockOptions(NamedTuple):
    """The options of a block that can be of use: keep first, then by their seconds."""

    slice: int
    number: int
    options: tuple[Option, ...]


class Group(NamedTuple):
    """Blocks with equal options, of which only counts are chosen."""

    options: tuple[Option, ...]
    """Without keep."""
    places: tuple[tuple[int, int], ...]
    """(slice, block)."""


Counts = list[tuple[int, ...]]
"""By group: how many of its blocks take each of its options; the others are kept."""


class SliceOptions:
    """The options of all blocks of a rank's slices, in their order."""

    def __init__(self, profile: Profile, slices: Sequence[Slice]) -> None:
        self.slices = slices
        self.blocks: list[BlockOptions] = []
        host = host_bandwidth(profile)
        for index, piece in enumerate(slices):
            fresh = profile.gradient_bytes(piece.start, piece.stop) if piece.load.fresh else None
            for number in range(piece.start, piece.stop):
                gradients = 0 if fresh is None else fresh[number - piece.start]
                found = block_options(profile, piece, number, gradients, host)
                self.blocks.append(BlockOptions(index, number, found))

    @cached_property
    def groups(self) -> list[Group]:
        found: dict[tuple[Option, ...], list[tuple[int, int]]] = {}
        for block in self.blocks:
            # What they give back is of no interest here.
            key = tuple(option._replace(given_back=0) for option in block.options[1:])
            found.setdefault(key, []).append((block.slice, block.number))
        return [Group(options, tuple(places)) for options, places in found.items() if options]

    def limited(self) -> Iterator[list[Group]]:
        """The groups with all options, and with ever fewer of those that make most again in backward."""
        sizes = {option.rebuilt for group in self.groups for option in group.options}
        for most in sorted({0, *sizes}, reverse=True):
            yield [
                group._replace(options=tuple(option for option in group.options if option.rebuilt <= most))
                for group in self.groups
            ]

    def placed(self, groups: Sequence[Group], counts: Counts) -> Policies:
        """Options that make something again go to the first blocks of a group: all behind them is given back before."""
        policies: Policies = [[KEEP] * (piece.stop - piece.start) for piece in self.slices]
        for group, numbers in zip(groups, counts, strict=True):
            first, last = 0, len(group.places)
            for option, count in zip(group.options, numbers, strict=True):
                if option.copied:
                    own, last = group.places[last - count : last], last - count
                else:
                    own, first = group.places[first : first + count], first + count
                for piece, block in own:
                    policies[piece][block - self.slices[piece].start] = option.policy
        return policies


def block_options(
    profile: Profile, piece: Slice, number: int, gradients: int, host: float
) -> tuple[Option, ...]:
    """`gradients`: bytes that a backward leaves of them; `host`: bytes a second of the link, out and back."""
    block, load, entered = profile.blocks[number], piece.load, input_bytes(profile.blocks, number)
    left = gradients + (block.deferred if load.split else 0)
    keeping = block.kept_bytes * load.in_flight
    options = []
    for name, policy in POLICIES.items():
        one = policy.held(block, entered)
        held = one * policy.minibatches(profile.device, load.in_flight)
        if name == KEEP or held < keeping:
            rebuilt, copied = policy.rebuilt(block, entered), policy.copied(block)
            running, seconds = block.working_bytes + rebuilt, policy.seconds(block)
            options.append(
                Option(
                    name, held, keeping - held, one - left, rebuilt, running, seconds, copied, copied / host
                )
            )
    return tuple(sorted(options, key=lambda option: (option.policy != KEEP, option.seconds)))


def saving_most(groups: Sequence[Group]) -> Counts:
    """Every block with the option that saves most."""
    counts: Counts = []
    for group in groups:
        best = max(group.options, key=lambda option: option.saved, default=None)
        counts.append(tuple(len(group.places) if option is best else 0 for option in group.options))
    return counts
