"""The exact choice: block by block from the last, as a backward goes through them.

What a running backward needs of a block depends on the policies of those behind it, so the order tells all there is
to know when a block's turn comes. What is left is bounded twice: by the least that its blocks can hold, and by the
time in which their best could save the bytes that are too many.

Equal blocks lead to the same in any order, so that a model of a few kinds of blocks takes few steps. Where they would
be too many the search gives up after `steps` of them, and what it has found is the best that is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from vpipe.cost import KEEP, RECOMPUTE, SWAP, Profile, held_bytes, update_bytes
from vpipe.plan.model import Slice, drained_update_bytes, waiting_bytes

ROUNDING = 1e-9


class Choice(NamedTuple):
    """What a policy means for one block."""

    policy: str
    held: int
    """Of all minibatches on the device."""
    given_back: int
    """By a backward when it is through with the block, less what that leaves."""
    running: int
    """Of the block while its backward runs, beyond what it held of that minibatch."""
    seconds: float
    swapped: int


class Turn(NamedTuple):
    """A block's turn, with what all later turns hold at least, hold if they keep all, and save at best."""

    choices: tuple[Choice, ...]
    last_of_slice: bool
    updating: int
    """What is needed when the backward is through with the block: for the update, where that follows it."""
    least_after: int
    keeping_after: int
    recomputing: float
    """Bytes that a second of it saves."""
    swapping: float
    """Bytes that a second of it saves, as if the link carried all; endless where it takes no time."""
    swapped_byte: float
    """Bytes that one more on the link saves, less what recomputing would save in the time that it takes."""


class BlockSearch:
    """Depth first, within limits of memory and time that every find lowers."""

    def __init__(self, profile: Profile, slices: Sequence[Slice], compute: float, host: float) -> None:
        self.turns: list[Turn] = []
        self.compute = compute
        self.host = host
        # When nothing is in flight nothing waits, which `fastest` and `smallest` leave out as fixed.
        self.drained = drained_update_bytes(profile, slices) - waiting_bytes(profile, slices)
        self.lingering = 0 if slices[0].load.asynchronous else profile.device.lingering
        least = keeping = rate = 0
        again, seconds = 0.0, inf  # the bytes that a second of recomputing saves; what swapping a byte takes
        for piece in slices:
            updating = (
                update_bytes(profile.blocks[piece.start : piece.stop]) if piece.load.asynchronous else 0
            )
            left = profile.gradient_bytes(piece.start, piece.stop) if piece.load.fresh else None
            for number in range(piece.start, piece.stop):
                choices = _choices(profile, piece, number, left[number - piece.start] if left else 0)
                last = number == piece.stop - 1
                swapping = rate / seconds if seconds else inf
                more = max(0.0, rate - (again * seconds if seconds else 0.0)) if rate else 0.0
                self.turns.append(Turn(choices, last, updating, least, keeping, again, swapping, more))
                updating = 0
                least += min(choice.held for choice in choices)
                keeping += choices[0].held
                for choice in choices[1:]:
                    if choice.policy == SWAP:
                        rate = max(rate, piece.load.in_flight - profile.device.lying(piece.load.in_flight))
                        seconds = min(seconds, choice.seconds / choice.swapped)
                    else:
                        saved = choices[0].held - choice.held
                        again = max(again, saved / choice.seconds if choice.seconds else inf)
        self.turns.reverse()
        self.seen: set[tuple[float, ...]] = set()
        self.found: list[str] | None = None

    def fastest(
        self, memory: int, floor: float, limit: float = inf, steps: float = inf
    ) -> tuple[float, list[str]] | None:
        """The least time within `memory` bytes, and the policies of all blocks: below `limit`, not below `floor`.

        None: there is none, or it was not found within so many `steps`.
        """
        self.memory, self.seconds, self.smaller = memory, limit, False
        self.floor, self.steps = floor, steps
        self.visit(0, 0, 0, 0, 0.0, 0, [])
        return None if self.found is None else (self.seconds, self.found)

    def smallest(self, memory: int) -> int:
        """The least memory, which is at most `memory`."""
        self.memory, self.seconds, self.smaller = memory, inf, True
        self.floor, self.steps = 0.0, inf
        self.visit(0, 0, 0, 0, 0.0, 0, [])
        return self.memory + (self.found is not None)

    def visit(
        self, index: int, held: int, gone: int, backward: int, spent: float, swapped: int, taken: list[str]
    ) -> None:
        if index == len(self.turns):
            self.found = taken[::-1]
            if self.smaller:
                self.memory = max(held + backward, self.drained + self.lingering * swapped) - 1
            else:
                self.seconds = max(self.compute + spent, swapped / self.host)
            return
        state = (index, held, gone, backward, spent, swapped)
        if state in self.seen or self.seconds <= self.floor * (1 + ROUNDING) or self.steps <= 0:
            return
        self.seen.add(state)
        self.steps -= 1
        turn = self.turns[index]
        gone = 0 if turn.last_of_slice else gone
        for choice in turn.choices:
            now = held + choice.held
            after = gone + choice.given_back
            most = max(backward, choice.running - gone, turn.updating - after)
            longer, moved = spent + choice.seconds, swapped + choice.swapped
            if now + most + turn.least_after > self.memory:
                continue
            if self.drained + self.lingering * moved > self.memory:
                continue
            excess = now + most + turn.keeping_after - self.memory
            if self.least_seconds(turn, excess, longer, moved) < self.seconds * (1 - ROUNDING):
                self.visit(index + 1, now, after, most, longer, moved, [*taken, choice.policy])

    def least_seconds(self, turn: Turn, excess: int, spent: float, swapped: int) -> float:
        """A bound for the time of all choices in which later turns save `excess` bytes.

        In T seconds that is no more than the best use of what is left of them saves, and no more than to recompute
        all that while and to swap, instead of some of it, whatever the link carries.
        """
        computed = self.compute + spent
        seconds = max(computed, swapped / self.host)
        if excess <= 0 or turn.recomputing == inf:
            return seconds
        rate = turn.recomputing + turn.swapped_byte * self.host
        if not rate:
            return inf
        both = (excess + turn.recomputing * computed + turn.swapped_byte * swapped) / rate
        return max(seconds, both, computed + excess / max(turn.recomputing, turn.swapping))


def _choices(profile: Profile, piece: Slice, number: int, gradients: int) -> tuple[Choice, ...]:
    """Those that can be of use: the quickest first, which keeps. `gradients`: that a backward leaves."""
    blocks, load = profile.blocks, piece.load
    block = blocks[number]
    kept, entered = block.kept_bytes, held_bytes(blocks, number, RECOMPUTE)
    left = gradients + (block.deferred if load.split else 0)
    working = block.working_bytes
    choices = [Choice(KEEP, kept * load.in_flight, kept - left, working, 0.0, 0)]
    lying = profile.device.lying(load.in_flight)
    if lying < load.in_flight and kept:
        choices.append(Choice(SWAP, kept * lying, kept - left, working, block.swapping, kept))
    if entered < kept:
        held, running = entered * load.in_flight, kept - entered + working
        choices.append(Choice(RECOMPUTE, held, entered - left, running, block.again, 0))
    return tuple(sorted(choices, key=lambda choice: choice.seconds))
