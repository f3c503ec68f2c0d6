"""What ranks choose when they have met: the links that they measure, in rounds of pairs."""

from collections import Counter
from itertools import combinations

import pytest

from vpipe.train.plan_by_ranks import rounds


@pytest.mark.parametrize("count", range(2, 10))
def test_every_pair_is_measured_once_and_no_host_twice_at_a_time(count: int) -> None:
    found = list(rounds(count))
    assert sorted(pair for pairs in found for pair in pairs) == list(combinations(range(count), 2))
    for pairs in found:
        assert max(Counter(host for pair in pairs for host in pair).values()) == 1
    assert len(found) == count - 1 + count % 2
