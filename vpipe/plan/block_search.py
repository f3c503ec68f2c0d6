"""The exact choice of options: block by block from the last, as a backward goes through them.

What a running backward needs of a block depends on the options of those behind it, which are known by then. What is
left is bounded twice: by the least that its blocks can hold, and by the time in which they could save the bytes that
are too many (`Prices`).

Equal blocks lead to the same in any order, so that a model of a few kinds of blocks takes few steps. Where they would
be too many the search gives up after `steps` of them, and what it has found is the best that is known.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from vpipe.cost import Profile, update_bytes
from vpipe.plan.count_search import Prices
from vpipe.plan.model import drained_update_bytes, waiting_bytes
from vpipe.plan.options import Option, SliceOptions

ROUNDING = 1e-9


class Turn(NamedTuple):
    """A block's turn, with what all later turns hold at least, hold if they keep all, and earn at most."""

    options: tuple[Option, ...]
    last_of_slice: bool
    updating: int
    """What is needed when the backward is through with the block: for the update, where that follows it."""
    least_after: int
    keeping_after: int
    earned_after: float


class BlockSearch:
    """Depth first, within limits of memory and time that every find lowers."""

    def __init__(self, profile: Profile, offered: SliceOptions, compute: float, prices: Prices) -> None:
        slices = offered.slices
        self.turns: list[Turn] = []
        self.compute, self.prices = compute, prices
        # When nothing is in flight nothing waits, which `fastest` and `smallest` leave out as fixed.
        self.drained = drained_update_bytes(profile, slices) - waiting_bytes(profile, slices)
        self.lingering = 0 if slices[0].load.asynchronous else profile.device.lingering
        least = keeping = 0
        earned = 0.0
        for index, number, options in offered.blocks:
            piece, updating = slices[index], 0
            if number == piece.start and piece.load.asynchronous:
                updating = update_bytes(profile.blocks[piece.start : piece.stop])
            self.turns.append(Turn(options, number == piece.stop - 1, updating, least, keeping, earned))
            least += min(option.held for option in options)
            keeping += options[0].held
            earned += max(0.0, *(prices.earned(option) for option in options))
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
        self.visit(0, 0, 0, 0, 0.0, 0, 0.0, [])
        return None if self.found is None else (self.seconds, self.found)

    def smallest(self, memory: int) -> int:
        """The least memory, which is at most `memory`."""
        self.memory, self.seconds, self.smaller = memory, inf, True
        self.floor, self.steps = 0.0, inf
        self.visit(0, 0, 0, 0, 0.0, 0, 0.0, [])
        return self.memory + (self.found is not None)

    def visit(
        self,
        index: int,
        held: int,
        gone: int,
        backward: int,
        spent: float,
        copied: int,
        copying: float,
        taken: list[str],
    ) -> None:
        if index == len(self.turns):
            self.found = taken[::-1]
            if self.smaller:
                self.memory = max(held + backward, self.drained + self.lingering * copied) - 1
            else:
                self.seconds = max(self.compute + spent, copying)
            return
        state = (index, held, gone, backward, spent, copied)
        if state in self.seen or self.seconds <= self.floor * (1 + ROUNDING) or self.steps <= 0:
            return
        self.seen.add(state)
        self.steps -= 1
        turn = self.turns[index]
        gone = 0 if turn.last_of_slice else gone
        for option in turn.options:
            now = held + option.held
            after = gone + option.given_back
            most = max(backward, option.running - gone, turn.updating - after)
            longer, moved, carried = spent + option.seconds, copied + option.copied, copying + option.copying
            if now + most + turn.least_after > self.memory:
                continue
            if self.drained + self.lingering * moved > self.memory:
                continue
            excess = now + most + turn.keeping_after - self.memory
            if self.least_seconds(turn, excess, longer, carried) < self.seconds * (1 - ROUNDING):
                self.visit(index + 1, now, after, most, longer, moved, carried, [*taken, option.policy])

    def least_seconds(self, turn: Turn, excess: int, spent: float, copying: float) -> float:
        """A bound for the time of all choices in which later turns save `excess` bytes."""
        prices, computed = self.prices, self.compute + spent
        priced = prices.cost(computed, copying) + prices.byte * max(0, excess) - turn.earned_after
        return max(computed, copying, priced)
