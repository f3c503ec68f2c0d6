"""The walk under the simulator: order on each rank only, times of messages, little memory, deadlocks."""

from itertools import islice
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.drawing import draws
from tests.schedules import schedules
from vpipe.cost import BlockCost, DeviceCost, LinkCost, Plan, Profile
from vpipe.schedule import Action, Deadlock, Schedule, build, walk
from vpipe.schedule.program import listed
from vpipe.simulate import simulate


@draws(60)
@given(schedules(), st.integers())
def test_the_order_of_events_changes_no_time(schedule: Schedule, seed: int) -> None:
    def cost(action: Action) -> float:
        return Random(f"{seed} {action}").choice((0.0, 0.5, 1.0, 3.0))

    def transit(action: Action, reader: int, end: float) -> float:
        return end + Random(f"{seed} {action} {reader}").random()

    sorted_events = list(walk(schedule, cost, transit=transit))
    events = list(walk(schedule, cost, transit=transit, by_start=False))
    assert sorted(events) == sorted(sorted_events)
    for rank in range(schedule.num_ranks):
        own = [event for event in events if event.rank == rank]
        assert own == [event for event in sorted_events if event.rank == rank]


def test_a_message_is_under_way() -> None:
    walked = walk(build("1f1b", 2, 1), transit=lambda action, reader, end: end + 0.5 + reader)
    assert {str(event.action): event.start for event in walked if event.action.minibatch == 0} == {
        "0F0": 0,
        "1F0": 2.5,
        "1B0": 3.5,
        "0B0": 6,
        "0STEP0": 8,
        "1STEP0": 5.5,
    }


def test_a_rank_may_be_held_up() -> None:
    def hold(rank: int, action: Action, start: float) -> float:
        return max(start, 10.0) if rank == 1 else start

    walked = {str(event.action): event.start for event in walk(build("1f1b", 2, 1), hold=hold)}
    assert (walked["1F0"], walked["0B0"]) == (10, 13)


@pytest.mark.parametrize("by_start", [True, False])
def test_only_what_is_still_needed_is_remembered(by_start: bool) -> None:
    running = walk(build("2bw", 3, None, replicas=(2, 1, 1)), by_start=by_start)
    assert len(list(islice(running, 5000))) == 5000
    state = running.gi_frame.f_locals["self"]  # type: ignore[attr-defined]
    assert sum(map(len, state.done)) < 24
    assert sum(map(len, state.gathered)) < 8


@pytest.mark.parametrize(
    ("programs", "waits"),
    [
        (
            ("0F0 0B1 0F1 0B0 0STEP1", "1F0 1B0 1F1 1B1 1STEP1"),
            "rank 0 waits in 0B1 for 0F1",
        ),
        (
            ("0F0 0F1 0B0 0B1 0STEP1", "1F0 1F1 1B0 1STEP1 1B1"),
            "rank 1 waits in 1STEP1 for 1 more backward",
        ),
    ],
)
def test_a_schedule_that_cannot_run_is_refused(programs: tuple[str, ...], waits: str) -> None:
    actions = [[Action.parse(text) for text in program.split()] for program in programs]
    schedule = Schedule("by hand", ((0,), (1,)), 2, 2, True, listed(actions), lazy=False)
    block = BlockCost("b", 1.0, 1.0, 1.0, 0.0, 1, 1, 1)
    profile = Profile((block,) * 2, DeviceCost(10**9, 1.0, 1.0), LinkCost(1.0, 0.0), 1)
    with pytest.raises(Deadlock, match=waits):
        simulate(profile, Plan((1, 1), ("keep",) * 2), schedule)
