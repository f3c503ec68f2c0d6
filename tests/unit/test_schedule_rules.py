"""The rules of which action must precede which."""

from dataclasses import replace

import pytest

from vpipe.errors import ScheduleError
from vpipe.schedule import Action, Rules, build, lower


def needed(rules: Rules, action: str, rank: int) -> list[str]:
    return sorted(f"{source}:{needed}" for source, needed in rules.dependencies(Action.parse(action), rank))


def test_a_chain_before_lowering() -> None:
    rules = Rules(build("1f1b", 3, 4))
    assert needed(rules, "0F2", 0) == []
    assert needed(rules, "1F2", 1) == ["0:0F2"]
    assert needed(rules, "1B2", 1) == ["1:1F2", "2:2I2"]
    assert needed(rules, "2I2", 2) == ["2:2F2"]
    assert needed(rules, "1W2", 1) == ["1:1I2"]
    assert needed(rules, "1STEP3", 1) == ["1:1W0", "1:1W1", "1:1W2", "1:1W3"]


def test_a_chain_after_lowering() -> None:
    rules = Rules(lower(build("1f1b", 3, 4)))
    assert needed(rules, "1F2", 1) == ["1:1RECV_F2"]
    assert needed(rules, "1RECV_F2", 1) == ["0:0SEND_F2"]
    assert needed(rules, "0SEND_F2", 0) == ["0:0F2"]
    assert needed(rules, "1B2", 1) == ["1:1F2", "1:1RECV_B2"]
    assert needed(rules, "1RECV_B2", 1) == ["2:2SEND_B2"]
    assert needed(rules, "2SEND_B2", 2) == ["2:2I2"]


def test_stages_on_one_rank_hand_over_without_a_message() -> None:
    rules = Rules(lower(build("zb-v", 2, 4)))
    assert needed(rules, "2F1", 1) == ["1:1F1"]
    assert needed(rules, "1I1", 1) == ["1:1F1", "1:2I1"]


def test_a_skip_connection_goes_straight_to_its_reader() -> None:
    rules = Rules(lower(build("1f1b", 3, 4), edges={(0, 1), (1, 2), (0, 2)}))
    assert needed(rules, "2RECV_F1", 2) == ["0:0SEND_F1", "1:1SEND_F1"]
    assert needed(rules, "0RECV_B1", 0) == ["1:1SEND_B1", "2:2SEND_B1"]


def test_replicas_meet_before_their_update() -> None:
    rules = Rules(lower(build("pipedream", 2, 5, replicas=(2, 1))))
    assert needed(rules, "0REDUCE3", 1) == ["1:0W3"]
    assert needed(rules, "0STEP3", 0) == ["0:0REDUCE3", "0:0W2", "1:0REDUCE3"]
    assert needed(rules, "0STEP4", 1) == ["0:0REDUCE4", "1:0REDUCE4"]


def test_stages_that_share_some_ranks_hand_over_now_and_then() -> None:
    """Minibatch m of the stages is on ranks m mod 2 and m mod 3: the same ones again every 6 minibatches."""
    rules = Rules(replace(build("pipedream", 2, 12), placement=((0, 1), (0, 1, 2))))
    assert rules.period == 6
    assert [minibatch for minibatch in range(12) if rules.local(0, 1, minibatch)] == [0, 1, 6, 7]


@pytest.mark.parametrize("edge", [(1, 0), (1, 1), (0, 3), (-1, 1)])
def test_wrong_edges_are_named(edge: tuple[int, int]) -> None:
    with pytest.raises(ScheduleError, match=rf"edge \({edge[0]}, {edge[1]}\) is wrong"):
        Rules(build("1f1b", 3, 4), [edge])
