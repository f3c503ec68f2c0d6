"""The searches for policies by themselves: exact at every limit of memory, and bounds that are never above them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.drawing import draws
from tests.unit.test_plan_optimal import block, problems
from vpipe.cost import BlockCost, DeviceCost, LinkCost, Profile
from vpipe.plan.block_search import BlockSearch
from vpipe.plan.choice import compute_seconds, fixed_bytes
from vpipe.plan.count_search import CountSearch, Prices, best_prices
from vpipe.plan.loads import loads_by_place
from vpipe.plan.model import Load, Slice, stage_memory, stage_time
from vpipe.plan.options import Group, Option, SliceOptions
from vpipe.plan.slices import TimeCosts
from vpipe.plan.sums import Span
from vpipe.schedule import kind_of

POLICIES = ("keep", "recompute", "swap")


def option(saved: int, seconds: float, copying: float = 0.0) -> Option:
    return Option("any", 0, saved, 0, 0, 0, seconds, 0, copying)


def groups(most: int) -> st.SearchStrategy[Group]:
    """Of up to three options and up to so many blocks."""
    options = st.builds(
        lambda saved, seconds, copying: option(saved, seconds / 4, copying / 4),
        st.integers(1, 60), st.integers(0, 12), st.just(0) | st.integers(0, 24),
    )  # fmt: skip
    return st.builds(
        lambda found, blocks: Group(tuple(found), tuple((0, number) for number in range(blocks))),
        st.lists(options, max_size=3, unique=True), st.integers(1, most),
    )  # fmt: skip


diverse = st.builds(
    lambda forward, kept, boundary, swapping: BlockCost(
        "b", forward / 4, 0.5, 0.5, 0.0, kept, boundary, 1, swapping=swapping / 4
    ),
    st.integers(1, 12), st.integers(1, 40), st.integers(0, 6), st.integers(0, 12),
)  # fmt: skip


@draws(120)
@given(
    st.lists(groups(2), min_size=1, max_size=4) | st.lists(groups(8), min_size=1, max_size=2),
    st.floats(0, 1),
)
def test_counts_equal_brute_force(found: list[Group], share: float) -> None:
    most = sum(max((one.saved for one in group.options), default=0) * len(group.places) for group in found)
    need, compute = max(1, round(share * most)), 3.0
    saved, longer, copying = np.zeros(1), np.zeros(1), np.zeros(1)
    for group in found:
        blocks, options = len(group.places), len(group.options)
        counts = np.indices((blocks + 1,) * options).reshape(options, -1) if options else np.zeros((0, 1))
        counts = counts[:, counts.sum(axis=0) <= blocks]
        columns = np.array([(one.saved, one.seconds, one.copying) for one in group.options]).reshape(-1, 3)
        more = counts.T @ columns
        saved, longer, copying = (
            np.add.outer(before, own).ravel()
            for before, own in zip((saved, longer, copying), more.T, strict=True)
        )
    best = np.where(saved >= need, np.maximum(compute + longer, copying), inf).min()
    search = CountSearch(found, need, compute, 0.0)
    if best == inf:
        assert search.counts is None
        return
    assert search.counts is not None
    assert search.seconds == pytest.approx(best)
    reached = 0
    for group, numbers in zip(search.groups, search.counts, strict=True):
        assert sum(numbers) <= len(group.places)
        reached += sum(one.saved * count for one, count in zip(group.options, numbers, strict=True))
    assert reached >= need


def test_a_byte_is_paid_as_much_as_the_last_one_costs() -> None:
    """One option saves a byte more than the other, and takes ten seconds for it."""
    group = Group((option(1000, 0.0), option(1001, 10.0)), ((0, 0),))
    assert best_prices([group], 1001, 3.0) == Prices(1.0, 10.0)
    assert best_prices([group], 1000, 3.0) == Prices(1.0, 0.0)
    search = CountSearch([group], 1001, 3.0, 0.0)
    assert search.counts == [(0, 1)]
    assert search.seconds == pytest.approx(13.0)


@draws(80)
@given(
    st.lists(block, min_size=1, max_size=5) | st.lists(diverse, min_size=5, max_size=5),
    st.integers(2, 5),
    st.sampled_from([(0, False), (1, False), (1, True)]),
    st.sampled_from([0.5, 4.0, 50.0]),
    st.tuples(st.floats(0, 1), st.floats(0, 2)),
    st.data(),
)
def test_block_by_block_equals_brute_force(
    blocks: list[BlockCost],
    in_flight: int,
    updating: tuple[int, bool],
    host: float,
    prices: tuple[float, float],
    data: st.DataObject,
) -> None:
    """Under a limit that some choice just meets, whatever the prices."""
    profile = Profile(tuple(blocks), DeviceCost(1, host, 2 * host), LinkCost(1.0, 0.0), 1)
    slices = [Slice(0, len(blocks), Load(1, in_flight, 1, 0, False, 1.0, *updating), (0,), None, None)]
    found = []
    for policies in product(POLICIES, repeat=len(blocks)):
        time = stage_time(profile, slices, [policies])
        found.append((stage_memory(profile, slices, [policies]).total, max(time.compute, time.host)))
    memory = data.draw(st.sampled_from([needed for needed, _ in found]))
    compute = compute_seconds(profile, slices)
    search = BlockSearch(profile, SliceOptions(profile, slices), compute, Prices(*prices))
    reached = search.fastest(memory - fixed_bytes(profile, slices), 0.0)
    assert reached is not None
    assert reached[0] == pytest.approx(min(seconds for needed, seconds in found if needed <= memory))


@draws(40)
@given(problems(), st.sampled_from(["pipedream", "2bw", "1f1b", "gpipe"]), st.booleans())
def test_bounds_of_slices_are_never_above_what_they_cost(
    problem: tuple[Profile, int, int], schedule: str, dear: bool
) -> None:
    profile, ranks, cap = problem
    if dear:
        profile = replace(profile, blocks=tuple(replace(b, swapping=b.forward / 2) for b in profile.blocks))
    costs = TimeCosts(profile, loads_by_place(kind_of(schedule), ranks, 5), cap)
    rows = np.arange(len(costs.loads.loads))
    for start in range(len(profile.blocks)):
        bounds = costs.quick(Span(start, len(profile.blocks), rows))
        for row in rows:
            for column, bound in enumerate(bounds[row]):
                assert bound <= costs.best(start, start + 1 + column, int(row))[0] * (1 + 1e-9)
