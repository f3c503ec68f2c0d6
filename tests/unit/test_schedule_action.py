"""Actions print and parse back."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vpipe.errors import ScheduleError
from vpipe.schedule import Action, Op


@given(st.builds(Action, st.integers(0, 2000), st.sampled_from(list(Op)), st.integers(0, 10**7)))
def test_prints_and_parses_back(action: Action) -> None:
    assert Action.parse(str(action)) == action
    assert pickle.loads(pickle.dumps(action)) == action


def test_looks() -> None:
    assert [str(Action(2, Op.F, 0)), str(Action(0, Op.SEND_F, 4)), str(Action(1, Op.STEP, 7))] == [
        "2F0",
        "0SEND_F4",
        "1STEP7",
    ]
    assert Action.parse(" 2F0 ").op is Op.F


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2f0", "-1F0", "2F0 3F0", "2SEND0", "2F0x"])
def test_anything_else_is_one_clear_error(text: str) -> None:
    with pytest.raises(
        ScheduleError, match="is not an action: write stage, operation, minibatch, such as 2F0"
    ):
        Action.parse(text)
