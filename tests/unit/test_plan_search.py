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
from vpipe.plan import branch
from vpipe.plan.branch import Search, efficiency
from vpipe.plan.exact import BlockSearch
from vpipe.plan.loads import loads_by_place
from vpipe.plan.model import Load, Slice, host_bandwidth, stage_memory, stage_time
from vpipe.plan.policies import compute_seconds, fixed_bytes
from vpipe.plan.prices import Group, best_prices
from vpipe.plan.slices import TimeCosts
from vpipe.plan.sums import Span
from vpipe.schedule import kind_of

POLICIES = ("keep", "recompute", "swap")


def groups(most: int) -> st.SearchStrategy[Group]:
    """Of up to so many blocks."""
    return st.builds(
        lambda kept, again, recompute, rate, swapping, blocks: Group(
            kept, again / 4, min(recompute, 3 * kept), rate * kept, swapping / 8, blocks
        ),
        st.integers(1, 30), st.integers(0, 12), st.integers(0, 60), st.integers(0, 2),
        st.just(0) | st.integers(0, 24), st.integers(1, most),
    )  # fmt: skip


diverse = st.builds(
    lambda forward, kept, boundary, swapping: BlockCost(
        "b", forward / 4, 0.5, 0.5, 0.0, kept, boundary, 1, swapping=swapping / 4
    ),
    st.integers(1, 12), st.integers(1, 40), st.integers(0, 6), st.integers(0, 12),
)  # fmt: skip


@draws(120)
@given(
    st.lists(groups(2), min_size=1, max_size=4) | st.lists(groups(12), min_size=1, max_size=2),
    st.sampled_from([0.5, 4.0, 50.0]),
    st.floats(0, 1),
    st.booleans(),
)
def test_counts_equal_brute_force(found: list[Group], host: float, share: float, priced: bool) -> None:
    """`priced`: with the bounds that otherwise only long searches have."""
    found = sorted(found, key=efficiency, reverse=True)
    most = sum(max(group.recompute, group.swap) * group.blocks for group in found)
    need, compute = max(1, round(share * most)), 3.0
    saved, longer, swapped = np.zeros(1), np.zeros(1), np.zeros(1)
    for group in found:
        again, count = np.indices((group.blocks + 1,) * 2).reshape(2, -1)
        again, count = again[again + count <= group.blocks], count[again + count <= group.blocks]
        saved = np.add.outer(saved, group.recompute * again + group.swap * count).ravel()
        longer = np.add.outer(longer, group.again * again + group.swapping * count).ravel()
        swapped = np.add.outer(swapped, group.kept * count).ravel()
    best = np.where(saved >= need, np.maximum(compute + longer, swapped / host), inf).min()
    search = Search(compute, host, 0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(branch, "SOON", 1 if priced else branch.SOON)
        counts = search.improve(found, need)
    if best == inf:
        assert counts is None
        return
    assert counts is not None
    assert search.seconds == pytest.approx(best)
    pairs = [(group, *both) for group, both in zip(found, counts, strict=True)]
    assert all(again + count <= group.blocks for group, again, count in pairs)
    assert sum(group.recompute * again + group.swap * count for group, again, count in pairs) >= need


def test_no_price_that_is_tried_pays_for_the_last_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Swapping saves one byte more than recomputing, and takes ten seconds for it."""
    group = Group(kept=1001, again=0.0, recompute=1000, swap=1001, swapping=10.0, blocks=1)
    assert best_prices([group], 1001, 3.0, 1e9).counts is None
    assert best_prices([group], 1000, 3.0, 1e9).counts == [(1, 0)]
    monkeypatch.setattr(branch, "SOON", 1)
    search = Search(3.0, 1e9, 0.0)
    assert search.improve([group], 1001) == [(0, 1)]
    assert search.seconds == pytest.approx(13.0)


@draws(80)
@given(
    st.lists(block, min_size=1, max_size=5) | st.lists(diverse, min_size=5, max_size=5),
    st.integers(2, 5),
    st.sampled_from([(0, False), (1, False), (1, True)]),
    st.sampled_from([0.5, 4.0, 50.0]),
    st.data(),
)
def test_block_by_block_equals_brute_force(
    blocks: list[BlockCost], in_flight: int, updating: tuple[int, bool], host: float, data: st.DataObject
) -> None:
    """Under a limit that some choice just meets."""
    profile = Profile(tuple(blocks), DeviceCost(1, host, 2 * host), LinkCost(1.0, 0.0), 1)
    slices = [Slice(0, len(blocks), Load(1, in_flight, 1, 0, False, 1.0, *updating), (0,), None, None)]
    found = []
    for policies in product(POLICIES, repeat=len(blocks)):
        time = stage_time(profile, slices, [policies])
        found.append((stage_memory(profile, slices, [policies]).total, max(time.compute, time.host)))
    memory = data.draw(st.sampled_from([needed for needed, _ in found]))
    search = BlockSearch(profile, slices, compute_seconds(profile, slices), host_bandwidth(profile))
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
