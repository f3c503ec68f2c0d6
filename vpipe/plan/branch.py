"""Branch and bound over groups of equal blocks: x of a group recomputed, y swapped, in the least time.

Groups come one after the other, those first that save most bytes a second of recomputing. The bound of what is left
forgets that a block cannot be both recomputed and swapped and that blocks are whole, and takes every swapped byte to
save as much as the best and to cost as little as the cheapest. Then time goes to what saves most in it: recompute the
groups in their order, in fractions, while the time lasts; and before those that save less a second than swapping does,
swap as much as the host link carries. A search that takes long gets a second bound, which does not forget the first of
these (`prices.py`).

The choice is exact (to 1e-9 of the time) where `gap` is 0, and otherwise where groups are few. Many blocks that are
almost but not quite equal could take for ever: with a gap, after `PATIENCE` steps a choice within it of the best is
good enough, and the gap doubles with each so many more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import ceil, inf

from vpipe.plan.prices import Counts, Group, Prices, best_prices

SOON = 30
"""Steps after which a search is worth better bounds (`prices.py`)."""
PATIENCE = 200
GAP = 1e-3
ROUNDING = 1e-9


def efficiency(group: Group) -> float:
    if group.recompute == 0:
        return 0.0
    return group.recompute / group.again if group.again else inf


class Search:
    """The best counts so far, of all rooms."""

    def __init__(self, compute: float, host: float, gap: float) -> None:
        self.compute = compute
        self.host = host
        self.gap = gap
        self.seconds = inf
        self.limit = inf
        """What a choice must stay below to be worth finding."""
        self.steps = 0

    def improve(self, groups: Sequence[Group], need: int) -> Counts | None:
        """The counts that save `need` bytes in less time than any before; None if there are none."""
        self.groups, self.need = groups, need
        self.prices: Prices | None = None
        self.found: Counts | None = None
        self.left_bytes = [0] * (len(groups) + 1)
        self.left_rate = [0.0] * (len(groups) + 1)
        self.left_most = [0] * (len(groups) + 1)
        self.left_swapping = [0.0] * (len(groups) + 1)
        cheapest = inf
        for index in range(len(groups) - 1, -1, -1):
            group = groups[index]
            rate = group.swap / group.kept if group.swap else 0.0
            self.left_bytes[index] = self.left_bytes[index + 1] + (
                group.kept * group.blocks if group.swap else 0
            )
            self.left_rate[index] = max(self.left_rate[index + 1], rate)
            if group.swap:
                cheapest = min(cheapest, group.swapping / group.kept)
            self.left_swapping[index] = cheapest if cheapest < inf else 0.0
            self.left_most[index] = (
                self.left_most[index + 1] + max(group.recompute, group.swap) * group.blocks
            )
        # Groups that save anything by recomputing come first: what those before each one take and save.
        self.spent, self.saved = [0.0], [0]
        for group in groups:
            if group.recompute == 0:
                break
            self.spent.append(self.spent[-1] + group.again * group.blocks)
            self.saved.append(self.saved[-1] + group.recompute * group.blocks)
        # Of these the ones that save more a second than swapping does: what they take from each one on.
        self.sooner = [0.0] * (len(groups) + 1)
        turn = 0
        for index, before in enumerate(self.spent):
            turn = max(turn, index)
            rate, swapping = self.left_rate[index], self.left_swapping[index]
            while (
                turn < len(self.spent) - 1 and groups[turn].recompute * swapping > groups[turn].again * rate
            ):
                turn += 1
            self.sooner[index] = self.spent[turn] - before
        self.counts: Counts = []
        if self.possible(0, need, 0.0, 0, self.limit):
            self.dive(need)
            self.visit(0, need, 0.0, 0)
        return self.found

    def possible(self, index: int, need: int, longer: float, swapped: int, seconds: float) -> bool:
        """Whether the groups from `index` on could save `need` bytes within `seconds`.

        Those before take `longer` than if they kept all, and swap so many bytes.
        """
        if self.left_most[index] < need:
            return False
        budget = seconds - self.compute - longer
        carried = min(seconds * self.host - swapped, self.left_bytes[index])
        if budget < 0 or carried < 0:
            return False
        if self.left_swapping[index]:
            carried = self.worth_carrying(index, budget, carried)
            budget = max(0.0, budget - carried * self.left_swapping[index])
        missing = need - carried * self.left_rate[index]
        spent, saved = self.spent, self.saved
        if missing <= 0 or index >= len(spent):
            return missing <= 0
        until = spent[index] + budget
        last = bisect_right(spent, until, index) - 1
        missing -= saved[last] - saved[index]
        if missing > 0 and last + 1 < len(spent):
            part = (until - spent[last]) / (spent[last + 1] - spent[last])
            missing -= (saved[last + 1] - saved[last]) * part
        return missing <= 0

    def promises(self, index: int, need: int, longer: float, swapped: int) -> bool:
        """Whether a choice below the limit may follow."""
        if not self.possible(index, need, longer, swapped, self.limit):
            return False
        if self.prices is None:
            return True
        computed, copied = self.compute + longer, swapped / self.host
        return self.prices.least_seconds(index, need, computed, copied) < self.limit

    def worth_carrying(self, index: int, budget: float, most: float) -> float:
        """Of `most` bytes, those that the bound swaps within the `budget` of the groups from `index` on."""
        return min(most, max(0.0, budget - self.sooner[index]) / self.left_swapping[index])

    def dive(self, need: int) -> None:
        """A first choice near the bound, so that the search has something to beat."""
        slowest = self.compute + sum(max(group.again, group.swapping) * group.blocks for group in self.groups)
        high = max(slowest, self.left_bytes[0] / self.host)
        low = self.compute
        for _ in range(20):
            middle = (low + high) / 2
            if self.possible(0, need, 0.0, 0, middle):
                high = middle
            else:
                low = middle
        for _ in range(40):
            if high >= self.limit:
                return
            counts = self.greedy(need, high)
            if counts is not None:
                self.record(counts)
                return
            high *= 1.02

    def greedy(self, need: int, seconds: float) -> Counts | None:
        """As the bound has it: what it swaps has its time set aside before anything is recomputed."""
        budget, carried, aside = seconds - self.compute, seconds * self.host, 0.0
        if self.left_swapping[0]:
            swapping = self.worth_carrying(0, budget, min(carried, self.left_bytes[0]))
            aside = swapping * self.left_swapping[0]
        budget = max(0.0, budget - aside)
        recomputed: list[int] = []
        for group in self.groups:
            count = 0
            if group.recompute and need > 0:
                count = min(group.blocks, ceil(need / group.recompute))
                if group.again * count > budget:
                    count = int(budget / group.again)
            recomputed.append(count)
            need -= count * group.recompute
            budget = max(0.0, budget - count * group.again)
        budget += aside
        swapped = [0] * len(self.groups)
        for index in range(len(self.groups) - 1, -1, -1):
            group = self.groups[index]
            if group.swap and need > 0:
                left = min(group.blocks - recomputed[index], ceil(need / group.swap))
                count = min(left, int(carried / group.kept))
                if group.swapping * count > budget:
                    count = int(budget / group.swapping)
                swapped[index] = count
                need -= count * group.swap
                carried -= count * group.kept
                budget = max(0.0, budget - count * group.swapping)
        return list(zip(recomputed, swapped, strict=True)) if need <= 0 else None

    def record(self, counts: Counts) -> None:
        pairs = list(zip(self.groups, counts, strict=False))
        longer = sum(group.again * again + group.swapping * count for group, (again, count) in pairs)
        swapped = sum(group.kept * count for group, (_, count) in pairs)
        seconds = max(self.compute + longer, swapped / self.host)
        if seconds < self.seconds:
            self.seconds = seconds
            self.set_limit()
            self.found = counts + [(0, 0)] * (len(self.groups) - len(counts))

    def set_limit(self) -> None:
        gap = self.gap * (2 ** min(self.steps // PATIENCE, 8) - 1)
        self.limit = self.seconds * (1 - max(ROUNDING, gap))

    def visit(self, index: int, need: int, spent: float, swapped: int) -> None:
        """Tries all counts of the groups from `index` on, behind `counts`, that could lead below the limit."""
        if need <= 0:
            self.record(list(self.counts))
            return
        self.steps += 1
        if self.steps == SOON:
            self.prices = best_prices(self.groups, self.need, self.compute, self.host)
            if self.prices.counts is not None:
                self.record(self.prices.counts)
        if self.steps % PATIENCE == 0:
            self.set_limit()
        kept, again, recompute, swap, swapping, blocks = self.groups[index]
        most = min(blocks, -(-need // recompute)) if recompute else 0
        budget = max(0.0, self.limit - self.compute - spent)
        if again * most > budget:
            most = int(budget / again)
        enough = self.left_most[index + 1]
        for recomputed in range(most, -1, -1):
            repeating = recomputed * again
            missing = need - recomputed * recompute
            useful = 0
            if swap and missing > 0:
                useful = min(-(-missing // swap), blocks - recomputed)
                if kept * useful > self.limit * self.host - swapped:
                    useful = int((self.limit * self.host - swapped) / kept)
                if swapping * useful > budget - repeating:
                    useful = int(max(0.0, budget - repeating) / swapping)
            for count in range(useful, -1, -1):
                moved = swapped + count * kept
                lacking = missing - count * swap
                if lacking > enough:
                    break  # with fewer swapped it only gets worse
                longer = spent + repeating + count * swapping
                if self.promises(index + 1, lacking, longer, moved):
                    self.counts.append((recomputed, count))
                    self.visit(index + 1, lacking, longer, moved)
                    self.counts.pop()
