"""Sends, receives and reductions."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.drawing import draws
from tests.schedules import ASYNCHRONOUS, plain_schedules, programs
from vpipe.errors import ScheduleError
from vpipe.schedule import Action, Op, Schedule, build, check, lower
from vpipe.schedule.action import COMMUNICATION


def test_a_chain_of_two() -> None:
    assert programs(lower(build("1f1b", 2, 1))) == [
        "0F0 0SEND_F0 0RECV_B0 0B0 0STEP0",
        "1RECV_F0 1F0 1B0 1SEND_B0 1STEP0",
    ]


def test_the_bottom_of_a_v_sends_nothing_to_itself() -> None:
    assert programs(lower(build("zb-v", 2, 1)))[1] == (
        "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2I0 1I0 1SEND_B0 2W0 1W0 2STEP0 1STEP0"
    )


def test_an_edge_may_skip_a_stage() -> None:
    lowered = lower(build("gpipe", 3, 1), edges=[(0, 2), (1, 2)])
    assert programs(lowered) == [
        "0F0 0SEND_F0 0RECV_B0 0B0 0STEP0",
        "1F0 1SEND_F0 1RECV_B0 1B0 1STEP0",
        "2RECV_F0 2F0 2B0 2SEND_B0 2STEP0",
    ]
    check(lowered)


def test_replicas_reduce_before_they_step() -> None:
    assert programs(lower(build("pipedream", 2, 3, replicas=(1, 2)))) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0RECV_B0 0B0 0RECV_B1 0B1 0STEP1 0RECV_B2 0B2 0STEP2",
        "1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE1 1STEP1 1RECV_F2 1F2 1B2 1SEND_B2 1REDUCE2 1STEP2",
        "1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE1 1STEP1 1REDUCE2 1STEP2",
    ]


def test_a_stage_reduces_while_the_others_of_its_rank_go_on() -> None:
    [program] = programs(lower(build("interleaved", 1, 2, chunks=2), reduce=[0, 1]))
    assert program == "0F0 1F0 1B0 0F1 0B0 1F1 1B1 1REDUCE1 0B1 0REDUCE1 1STEP1 0STEP1"


def test_named_stages_reduce() -> None:
    lowered = lower(build("gpipe", 3, 2), reduce=[0, 2])
    assert lowered.reduced == {0, 2}
    assert ["REDUCE" in program for program in programs(lowered)] == [True, False, True]
    with pytest.raises(ScheduleError, match="reduce names stage 3: stages are 0 to 2"):
        lower(build("gpipe", 3, 2), reduce=[3])


def test_twice_is_once_too_often() -> None:
    with pytest.raises(ScheduleError, match="is lowered already"):
        lower(lower(build("gpipe", 2, 2)))


@draws(40)
@given(plain_schedules())
def test_lowering_only_adds(schedule: Schedule) -> None:
    lowered = lower(schedule)
    for rank in range(schedule.num_ranks):
        kept = [action for action in lowered.program(rank) if action.op not in COMMUNICATION]
        assert kept == list(schedule.program(rank))


@draws(40)
@given(plain_schedules())
def test_sends_and_receives_pair(schedule: Schedule) -> None:
    lowered = lower(schedule)
    actions = [action for rank in range(schedule.num_ranks) for action in lowered.program(rank)]
    by_op = {op: Counter((a.stage, a.minibatch) for a in actions if a.op is op) for op in Op}
    assert {(stage + 1, m) for stage, m in by_op[Op.SEND_F]} == set(by_op[Op.RECV_F])
    assert {(stage - 1, m) for stage, m in by_op[Op.SEND_B]} == set(by_op[Op.RECV_B])
    assert all(
        count == 1 for op in (Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B) for count in by_op[op].values()
    )


@draws(40)
@given(plain_schedules())
def test_all_replicas_reduce_in_the_same_order(schedule: Schedule) -> None:
    """Otherwise collectives that block would wait for each other."""
    lowered = lower(schedule)
    for ranks in set(schedule.placement):
        orders = {tuple(a for a in lowered.program(rank) if a.op is Op.REDUCE) for rank in ranks}
        assert len(orders) == 1
        assert bool(orders.pop()) == (len(ranks) > 1)


@draws(50)
@given(st.sampled_from(ASYNCHRONOUS), st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(1, 20))
def test_a_known_end_changes_nothing(name: str, replicas: list[int], end: int) -> None:
    endless = lower(build(name, len(replicas), None, replicas=replicas))
    ended = lower(build(name, len(replicas), end, replicas=replicas))
    for rank in range(ended.num_ranks):
        assert list(endless.program(rank, lambda m: m < end)) == list(ended.program(rank))


def test_a_million_minibatches_are_lowered_lazily() -> None:
    program = lower(build("pipedream", 4, 10**6)).program(3)
    assert [next(program) for _ in range(2)] == [Action(3, Op.RECV_F, 0), Action(3, Op.F, 0)]
