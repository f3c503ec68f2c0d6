"""Branch and bound over groups of equal blocks: how many of each take which option, in the least time.

A choice takes max(compute + longer, copying), so for any share from 0 to 1 no less than

    share x (compute + longer) + (1 - share) x copying

If each saved byte is paid a price, every block can be looked at by itself: it takes the option that earns most. No
choice takes less than the price of all bytes that are needed, less what all blocks earn at it. That holds for any share
and price (they are Lagrange multipliers); the best of them give the bound of this search, and of `block_search.py`.
What earns most at the price where just enough is saved is a good first choice.

The choice is exact (to 1e-9 of the time) where `gap` is 0, and otherwise where groups are few. Many blocks that are
almost but not quite equal could take for ever: with a gap, after `PATIENCE` steps a choice within it of the best is
good enough, and the gap doubles with each so many more. After `MOST` steps the best choice so far has to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from vpipe.plan.options import Counts, Group, Option

PATIENCE = 200
MOST = 10_000
GAP = 1e-3
ROUNDING = 1e-9
HALVINGS = 10


class Prices(NamedTuple):
    share: float
    byte: float

    def earned(self, option: Option) -> float:
        return self.byte * option.saved - self.cost(option.seconds, option.copying)

    def cost(self, computed: float, copied: float) -> float:
        return self.share * computed + (1 - self.share) * copied


def best_prices(groups: Sequence[Group], need: int, compute: float) -> Prices:
    """Those with nearly the highest bound for saving `need` bytes, if the groups can."""
    low, high, share = 0.0, 1.0, 1.0
    best, highest = Prices(1.0, 0.0), -inf
    for _ in range(HALVINGS if need > 0 else 0):
        byte, computed, copied, earned = _at_share(groups, need, share)
        bound = share * compute + byte * need - earned
        if bound > highest:
            best, highest = Prices(share, byte), bound
        # The bound is concave in the share; what it relaxes to tells where it rises.
        if compute + computed < copied:
            high = share
        elif share == 1.0:
            break
        else:
            low = share
        share = (low + high) / 2
    return best


def _at_share(groups: Sequence[Group], need: int, share: float) -> tuple[float, float, float, float]:
    """The price at which just enough is saved, what that takes of compute and link, and what all groups earn."""
    steps = []
    for group in groups:
        # From keep to the option that saves most, each time the cheapest way to save more.
        saved, cost, seconds, copying = 0, 0.0, 0.0, 0.0
        offered = [(o.saved, share * o.seconds + (1 - share) * o.copying, o) for o in group.options]
        while offered:
            rate, option = min(((own - cost) / (size - saved), -size, o) for size, own, o in offered)[::2]
            blocks = len(group.places)
            more = (option.saved - saved) * blocks
            steps.append(
                (rate, more, (option.seconds - seconds) * blocks, (option.copying - copying) * blocks)
            )
            saved, seconds, copying = option.saved, option.seconds, option.copying
            cost = share * seconds + (1 - share) * copying
            offered = [one for one in offered if one[0] > saved]
    steps.sort()
    byte = computed = copied = earned = 0.0
    passed: list[tuple[float, int]] = []
    for rate, more, longer, carried in steps:
        part = min(1.0, need / more) if need > 0 else 0.0
        if part <= 0:
            break
        byte, need = rate, need - more
        computed, copied = computed + part * longer, copied + part * carried
        passed.append((rate, more))
    earned = sum((byte - rate) * more for rate, more in passed)
    return byte, computed, copied, earned


class Column(NamedTuple):
    """One option of one group, with bounds of what follows."""

    group: int
    option: Option
    last: bool
    """Whether it is the last option of its group."""
    earned: float
    saved: int
    """By each block of the group that takes one of the options behind this one, at most."""
    earned_after: float
    saved_after: int
    """By all groups behind this one, at most."""


class CountSearch:
    """The best counts below `limit` seconds that save `need` bytes: `counts`, and `seconds`."""

    def __init__(
        self, groups: Sequence[Group], need: int, compute: float, gap: float, limit: float = inf
    ) -> None:
        # Those first that save most for their cost.
        self.prices = prices = best_prices(groups, need, compute)
        self.groups = sorted(groups, key=lambda group: _worth(prices, group), reverse=True)
        self.need, self.compute, self.gap = need, compute, gap
        self.seconds, self.steps = limit, 0
        self.counts: Counts | None = None
        self.set_limit()
        self.columns: list[Column] = []
        earned_after, saved_after = 0.0, 0
        for index in range(len(self.groups) - 1, -1, -1):
            earned, saved = 0.0, 0
            group = self.groups[index]
            for option in reversed(group.options):
                last = option is group.options[-1]
                self.columns.append(Column(index, option, last, earned, saved, earned_after, saved_after))
                earned, saved = max(earned, prices.earned(option)), max(saved, option.saved)
            earned_after += earned * len(group.places)
            saved_after += saved * len(group.places)
        self.columns.reverse()
        self.taken: list[int] = []
        if need <= 0 or (saved_after >= need and self.bound(need, 0.0, 0.0, earned_after) < self.limit):
            self.take_what_earns_most()
            self.visit(0, need, 0.0, 0.0)

    def bound(self, need: int, longer: float, copying: float, earned: float) -> float:
        return self.prices.cost(self.compute + longer, copying) + self.prices.byte * need - earned

    def take_what_earns_most(self) -> None:
        """A first choice near the bound, so that the search has something to beat."""
        need, taken = self.need, [0] * len(self.columns)
        offered: dict[int, tuple[float, int]] = {}
        for place, column in enumerate(self.columns):
            earned = self.prices.earned(column.option)
            if earned > offered.get(column.group, (0.0, 0))[0]:
                offered[column.group] = earned, place
        for _, place in sorted(offered.values(), reverse=True):
            option, blocks = self.columns[place].option, len(self.groups[self.columns[place].group].places)
            taken[place] = max(0, min(blocks, -(-need // option.saved)))
            need -= taken[place] * option.saved
        if need <= 0:
            self.record(taken)

    def record(self, taken: list[int]) -> None:
        pairs = list(zip(self.columns, taken, strict=False))
        longer = sum(column.option.seconds * count for column, count in pairs)
        copying = sum(column.option.copying * count for column, count in pairs)
        seconds = max(self.compute + longer, copying)
        if seconds < self.seconds:
            self.seconds = seconds
            self.set_limit()
            numbers = iter([*taken, *[0] * (len(self.columns) - len(taken))])
            self.counts = [tuple(next(numbers) for _ in group.options) for group in self.groups]

    def set_limit(self) -> None:
        """`limit` is what a choice must stay below to be worth finding."""
        gap = self.gap * (2 ** min(self.steps // PATIENCE, 8) - 1)
        self.limit = self.seconds * (1 - max(ROUNDING, gap))
        if self.gap and self.steps >= MOST and self.counts is not None:
            self.limit = -inf

    def visit(self, place: int, need: int, longer: float, copying: float, left: int | None = None) -> None:
        """Tries all counts from column `place` on that could lead below the limit; `left`: blocks of its group."""
        if need <= 0:
            self.record(self.taken)
            return
        self.steps += 1
        if self.steps % PATIENCE == 0:
            self.set_limit()
        group, option, last, earned, saved, earned_after, saved_after = self.columns[place]
        left = len(self.groups[group].places) if left is None else left
        for count in range(min(left, -(-need // option.saved)), -1, -1):
            missing, others = need - count * option.saved, left - count
            spent, carried = longer + count * option.seconds, copying + count * option.copying
            too_little = missing > others * saved + saved_after
            if too_little or max(self.compute + spent, carried) >= self.limit:
                continue
            if self.bound(missing, spent, carried, others * earned + earned_after) < self.limit:
                self.taken.append(count)
                self.visit(place + 1, missing, spent, carried, None if last else others)
                self.taken.pop()


def _worth(prices: Prices, group: Group) -> float:
    """What the group's best option saves for its cost."""
    found = ((option.saved, prices.cost(option.seconds, option.copying)) for option in group.options)
    return max((saved / cost if cost else inf for saved, cost in found), default=0.0)
