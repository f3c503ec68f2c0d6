"""Schedules as CSV."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.drawing import draws
from tests.schedules import plain_schedules, programs, schedules
from vpipe.errors import ScheduleError
from vpipe.schedule import Op, Schedule, build, check, lower, read_table, write_table
from vpipe.schedule.program import shortened


def test_one_row_a_rank() -> None:
    assert write_table(build("1f1b", 2, 2)) == "0F0,0F1,0B0,0B1,0STEP1\n1F0,1B0,1F1,1B1,1STEP1\n"


@draws(40)
@given(schedules())
def test_what_is_written_is_read(schedule: Schedule) -> None:
    assert schedule.minibatches is not None
    read = read_table(write_table(schedule), schedule.name)
    assert programs(read) == programs(schedule)
    assert (read.name, read.placement) == (schedule.name, schedule.placement)
    assert read.minibatches == schedule.minibatches
    assert read.update_interval == min(schedule.update_interval, schedule.minibatches)
    assert (read.reduced, read.lowered) == (schedule.reduced, schedule.lowered and schedule.num_ranks > 1)
    check(read)


def test_a_table_without_updates_is_synchronous() -> None:
    read = read_table("0F0, 0B0,\n,1F0,1B0\n")
    assert programs(read) == ["0F0 0B0 0STEP0", "1F0 1B0 1STEP0"]
    assert read.synchronous


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("0F0,0B0\n1F0,1Q0", "mine.csv, row 2, column 2: '1Q0' is not an action"),
        ("", "mine.csv: there is no action in the table"),
        ("0F0,0B0\n2F0,2B0", "mine.csv: stage 1 is on no rank"),
        ("0F0,0B0\n\n1F0,1B0", "mine.csv, row 2: rank 1 has no action"),
    ],
)
def test_mistakes_are_named(table: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        read_table(table, "mine.csv")


@draws(60)
@given(plain_schedules(), st.integers(1, 14), st.booleans())
def test_a_table_can_be_run_with_fewer_minibatches(schedule: Schedule, count: int, lowered: bool) -> None:
    """As the last time, when the data ends."""
    table = read_table(write_table(lower(schedule) if lowered else schedule))
    assert table.minibatches is not None
    count = min(count, table.minibatches)
    shorter = shortened(table, count)
    check(shorter)
    steps = {a.minibatch for rank in range(table.num_ranks) for a in shorter.program(rank) if a.op is Op.STEP}
    assert max(steps) == count - 1
