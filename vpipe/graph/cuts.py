"""Positions at which the graph can be cut cheaply.

A cut is a position in the order of the owned operations; its cost is the bytes of the values that live across it.
For a transformer the cost rises inside each half layer, where the residual is live beside what is being computed,
and falls back between them:

    bytes   _/\\_/\\/\\_/\\_/\\/\\_      cut where one value crosses, or where the bytes are low between
            ^    ^    ^    ^    ^     two peaks, unless cuts a little before and behind are much cheaper

Values that every layer reads (an encoder's output, a position bias) cross all cuts, so they do not count here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, takewhile

from torch import fx

from vpipe.graph.ownership import Ownership
from vpipe.graph.trace import Trace

# The peaks on both sides of a cut have to be this many times as high as the cut.
_PROMINENCE = 1.25
# A cut is left out if cuts nearby on both sides are cheaper by this factor. Nearby: between the two lie at most so many
# matrix products, or at most this share of the model's.
_DOMINANCE = 1.5
_NEARBY_PRODUCTS = 6
_NEARBY_SHARE = 0.25
# A value that is twice unread for this many matrix products and then read again belongs to all layers: a residual is
# unread once, until the end of its half layer.
_LONG_WAIT = 6


class CutOrder:
    """The owned operations as positions 0, 1, ...; cut i lies behind position i.

    `paths[i]` are the modules around position i, `products[i]` the matrix products up to it, `allowed[i]` says whether
    cut i may be made at all, `crossing[i]` are the bytes that are live across it.
    """

    def __init__(self, trace: Trace, ownership: Ownership, flops: Sequence[int]) -> None:
        self.nodes = ownership.owned
        self.paths: list[tuple[str, ...]] = [node.meta.get("module_path", ()) for node in self.nodes]
        position = {node: i for i, node in enumerate(self.nodes)}
        self._uses = [
            sorted(position[user] for user in node.users if user in position) for node in self.nodes
        ]
        self._sizes = [trace.num_bytes(node) if node in trace.specs else 0 for node in self.nodes]
        self.products = list(accumulate(int(count > 0) for count in flops))
        self.allowed = _allowed(trace, ownership, position, self._uses)
        self._local = [True] * len(self.nodes)
        self.crossing = [*self.live(0, len(self.nodes) - 1)[0][1:], 0]
        self._local = _local(self._uses, self.products)

    def live(self, start: int, end: int) -> tuple[list[int], list[int]]:
        """Bytes and number of local values across cuts start-1..end-1, seen from positions start..end.

        A value counts while a position up to `end` still reads it: one with later readers only is sent straight to
        them and costs nothing here.
        """
        change = [0] * (end - start + 2)
        count = [0] * (end - start + 2)
        for made in range(end + 1):
            if not self._local[made]:
                continue
            last = max((use for use in self._uses[made] if use <= end), default=-1)
            first = max(made + 1, start)
            if last >= first:
                change[first - start] += self._sizes[made]
                change[last - start + 1] -= self._sizes[made]
                count[first - start] += 1
                count[last - start + 1] -= 1
        return list(accumulate(change))[: end - start + 1], list(accumulate(count))[: end - start + 1]


def _local(uses: Sequence[Sequence[int]], products: Sequence[int]) -> list[bool]:
    """Whether only one layer reads the result of each position."""
    waits = [
        [products[use] - products[last] for last, use in zip((made, *own), own, strict=False)]
        for made, own in enumerate(uses)
    ]
    return [sum(wait >= _LONG_WAIT for wait in own) < 2 for own in waits]


def _allowed(
    trace: Trace, ownership: Ownership, position: dict[fx.Node, int], uses: Sequence[Sequence[int]]
) -> list[bool]:
    nodes = ownership.owned
    allowed = [trace.boundaries is None or node in trace.boundaries for node in nodes[1:]] + [False]

    def forbid(first: int, last: int) -> None:
        for cut in range(first, last):
            allowed[cut] = False

    # Tuples, sizes and tensors of unknown shape cannot be sent.
    for made, node in enumerate(nodes):
        if uses[made] and not trace.is_sized(node):
            forbid(made, uses[made][-1])
    # A storage is written in the stage that made it; a buffer that changes belongs to one stage.
    for cluster in set(ownership.clusters.values()):
        touched = [position[node] for node in (*cluster.members, *cluster.writes) if node in position]
        written = [position[write] for write in cluster.writes if write in position]
        if any(member in ownership.mutated for member in cluster.members):
            users = (user for member in cluster.members for user in member.users)
            written += [*touched, *(position[user] for user in users if user in position)]
        if written:
            forbid(min(touched), max(written))
    forbid(position[trace.loss], len(nodes))
    return allowed


def candidate_cuts(trace: Trace, order: CutOrder, *, rules_out: bool = True) -> list[int]:
    """All cuts worth considering, in order. `rules_out`: much cheaper cuts nearby on both sides rule out a cut."""
    if trace.boundaries is not None:
        return [cut for cut, allowed in enumerate(order.allowed) if allowed]
    found: list[int] = []
    # Spans of positions with the cost of the cut behind them; the graph's end is no cut.
    spans: list[tuple[int, int, float]] = [(0, len(order.nodes) - 1, math.inf)]
    while spans:
        start, end, behind = spans.pop()
        cuts = _cuts_within(order, start, end, behind, rules_out=rules_out)
        if not cuts:
            continue
        found += cuts
        starts = [start, *(cut + 1 for cut in cuts)]
        spans += list(zip(starts, [*cuts, end], [*cuts.values(), behind], strict=True))
    return sorted(found)


def _cuts_within(
    order: CutOrder, start: int, end: int, behind: float, *, rules_out: bool
) -> dict[int, float]:
    """The cuts of a span that are worth making, with their costs."""
    costs, counts = order.live(start, end)
    before = costs[0] if start else math.inf
    costs, counts = costs[1:], counts[1:]  # of the cuts start..end-1
    cheap = [
        offset
        for offset, count in enumerate(counts)
        if order.allowed[start + offset] and (count == 1 or _is_prominent(costs, offset))
    ]
    borders = {start - 1: before, **{start + offset: costs[offset] for offset in cheap}, end: behind}
    cuts = {
        start + offset: costs[offset]
        for offset in cheap
        if not (rules_out and _is_dominated(order, borders, start + offset))
    }
    # Of cuts with no matrix product between them only the cheapest: the others would cut a norm off its layer.
    best: dict[int, float] = {order.products[start - 1] if start else 0: before, order.products[end]: behind}
    for cut, cost in cuts.items():
        best[order.products[cut]] = min(cost, best.get(order.products[cut], math.inf))
    return {cut: cost for cut, cost in cuts.items() if cost == best[order.products[cut]]}


def _is_dominated(order: CutOrder, costs: Mapping[int, float], cut: int) -> bool:
    """Whether cuts nearby on both sides are much cheaper; `costs` are in the order of the cuts."""
    cheaper = [other for other, cost in costs.items() if _DOMINANCE * cost < costs[cut]]
    before = max((other for other in cheaper if other < cut), default=None)
    behind = min((other for other in cheaper if other > cut), default=None)
    if before is None or behind is None:
        return False
    between = order.products[behind] - (order.products[before] if before >= 0 else 0)
    return between <= max(_NEARBY_PRODUCTS, _NEARBY_SHARE * order.products[-1])


def _is_prominent(costs: Sequence[int], offset: int) -> bool:
    """Whether there is a high peak on both sides before the costs fall below this one's."""
    here = costs[offset]
    sides = (range(offset - 1, -1, -1), range(offset + 1, len(costs)))
    higher = (takewhile(here.__le__, (costs[i] for i in side)) for side in sides)
    return all(max(side, default=here) >= _PROMINENCE * here for side in higher)
