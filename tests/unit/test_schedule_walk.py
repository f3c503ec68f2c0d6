"""The event loop."""

from itertools import islice
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.drawing import draws
from tests.schedules import schedules
from vpipe.errors import ScheduleError
from vpipe.schedule import Action, Deadlock, Op, Rules, Schedule, build, listed, lower, walk


def events(schedule: Schedule) -> list[str]:
    return [f"{rank}: {action} {start:g}-{end:g}" for rank, action, start, end in walk(schedule)]


def by_hand(*programs: str, stages: int = 2, lowered: bool = False) -> Schedule:
    """A synchronous schedule whose rank r holds stage r."""
    actions = [[Action.parse(text) for text in program.split()] for program in programs]
    minibatches = 1 + max(action.minibatch for program in actions for action in program)
    placement = tuple((stage,) for stage in range(stages))
    return Schedule("by hand", placement, minibatches, minibatches, True, listed(actions), False, lowered)


def test_two_stages() -> None:
    assert events(build("1f1b", 2, 1)) == [
        "0: 0F0 0-1",
        "1: 1F0 1-2",
        "1: 1B0 2-4",
        "0: 0B0 4-6",
        "1: 1STEP0 4-4",
        "0: 0STEP0 6-6",
    ]


def test_messages_cost_what_the_caller_says() -> None:
    cost = {Op.F: 1.0, Op.B: 2.0, Op.SEND_F: 0.25, Op.RECV_F: 0.5}
    walked = {
        str(a): (s, e) for _, a, s, e in walk(lower(build("1f1b", 2, 1)), lambda a: cost.get(a.op, 0.0))
    }
    assert walked["0SEND_F0"] == (1.0, 1.25)
    assert walked["1RECV_F0"] == (1.25, 1.75)
    assert walked["1F0"] == (1.75, 2.75)


def test_a_send_waits_for_room() -> None:
    schedule = by_hand(
        "0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0RECV_B0 0B0 0RECV_B1 0B1 0RECV_B2 0B2",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1RECV_F2 1F2 1B2 1SEND_B2",
        lowered=True,
    )
    sent = {
        buffer: [s for _, a, s, _ in walk(schedule, buffer=buffer) if a.op is Op.SEND_F]
        for buffer in (1, 2, None)
    }
    assert sent == {1: [1, 2, 4], 2: [1, 2, 3], None: [1, 2, 3]}


def test_who_waits_for_what() -> None:
    with pytest.raises(Deadlock) as caught:
        list(walk(by_hand("0F0 0B1 0F1 0B0", "1F0 1B0 1F1 1B1")))
    assert str(caught.value) == "deadlock: rank 0 waits in 0B1 for 0F1; rank 1 waits in 1F1 for 0F1"


def test_an_update_waits_for_all_replicas() -> None:
    schedule = lower(build("pipedream", 2, 2, replicas=(1, 2)))
    cost = {Op.F: 1.0, Op.B: 2.0}
    slow = Action(1, Op.B, 1)
    steps = [
        (rank, start)
        for rank, action, start, _ in walk(schedule, lambda a: 9.0 if a == slow else cost.get(a.op, 0.0))
        if action.op is Op.STEP and action.stage == 1
    ]
    assert steps == [(1, 12.0), (2, 12.0)]


def test_an_update_without_its_gradient_never_starts() -> None:
    with pytest.raises(Deadlock, match="rank 0 waits in 0STEP0 for 1 more backward of stage 0 before it"):
        list(walk(by_hand("0F0 0STEP0 0B0", stages=1)))


def test_a_buffer_holds_something() -> None:
    with pytest.raises(ScheduleError, match="a channel buffers at least one message, not 0"):
        walk(build("1f1b", 2, 2), buffer=0)


@draws(30)
@given(schedules(), st.randoms())
def test_the_rules_are_kept_at_any_cost(schedule: Schedule, random: Random) -> None:
    """Against the rules themselves: all that an action needs has ended when it starts."""
    rules = Rules(schedule)
    ended: dict[tuple[int, Action], float] = {}
    free = [0.0] * schedule.num_ranks
    latest = 0.0
    for rank, action, start, end in walk(schedule, lambda _: random.choice((0.0, 0.5, 1.0, 3.0)), buffer=1):
        assert start >= max(latest, free[rank])
        assert all(ended[need] <= start for need in rules.dependencies(action, rank))
        latest, free[rank] = start, end
        for op in (Op.I, Op.W) if action.op is Op.B else (action.op,):
            ended[rank, action._replace(op=op)] = end
    assert schedule.minibatches is not None
    assert len(ended) >= 3 * schedule.num_stages * schedule.minibatches


def test_an_endless_schedule_is_walked_with_little_memory() -> None:
    steps = (event for event in walk(build("pipedream", 4, None)) if event.action == Action(0, Op.STEP, 500))
    assert next(steps).start == pytest.approx(3 * 501 + 3 * 3, abs=1)
    running = walk(build("2bw", 3, None, replicas=(2, 1, 1)))
    assert len(list(islice(running, 5000))) == 5000
    state = running.gi_frame.f_locals["self"]  # type: ignore[attr-defined]
    assert max(len(state.done), len(state.gathered), len(state.joined), len(state.waiting)) < 12
