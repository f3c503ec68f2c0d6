"""`VPIPE_FAULT`: a mistake in it is reported; it strikes where, when and as often as it says."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from tests import models
from tests.examples import varied
from vpipe import Pipeline
from vpipe.errors import ConfigError
from vpipe.pipeline.threads import run_ranks
from vpipe.runtime.faulty import with_faults
from vpipe.schedule import Action
from vpipe.system import faults
from vpipe.system.faults import ATTEMPT, TENSOR_POINTS, VARIABLE, Fault, read_faults
from vpipe.weights import optimizer_factory


def test_the_guides_example() -> None:
    (fault,) = read_faults("rank=2,step=5,point=fwd_send,minibatch=3,kind=kill")
    assert fault == Fault(2, "fwd_send", "kill", step=5, minibatch=3)


def test_several_with_spaces() -> None:
    first, second = read_faults(
        " rank=0, point=data, kind=sleep, seconds=0.5 ; rank=1,point=eval,kind=exit,attempt=2;"
    )
    assert (first.seconds, second.attempt) == (0.5, 2)
    assert read_faults("") == []


MISTAKES = {
    "rank=1,point=fwd": "kind= is missing",
    "rank=1,point=forward,kind=kill": "point is 'forward': did you mean 'fwd'?",
    "rank=1,point=fwd,kind=kil": "did you mean 'kill'?",
    "rnk=1,point=fwd,kind=kill": "did you mean 'rank'?",
    "rank=one,point=fwd,kind=kill": "rank is 'one', which is no number",
    "rank=-1,point=fwd,kind=kill": "rank is '-1', which is no number from 0 on",
    "rank=0,point=data,kind=nan": "there is no tensor at data",
    "kill": "'kill' is not key=value",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_mistakes_are_reported(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_faults(text)
    assert str(caught.value).startswith(f"VPIPE_FAULT is {text!r}: ")
    assert MISTAKES[text] in str(caught.value)


@pytest.fixture(scope="module")
def example() -> models.Example:
    return models.bert(2)


@pytest.fixture
def faulty(
    monkeypatch: pytest.MonkeyPatch, capture_once: None, example: models.Example
) -> Callable[..., Any]:
    """Train six minibatches with a fault; losses, where each rank was last, and whether its weights are finite."""

    def train(
        text: str, attempt: int = 0, schedule: str = "pipedream"
    ) -> tuple[Any, dict[int, Action | None]]:
        monkeypatch.setenv(VARIABLE, text)
        monkeypatch.setenv(ATTEMPT, str(attempt))
        faults.wanted.cache_clear()
        model, batch, loss_fn = example
        places = {}

        def on_rank(world: Any) -> tuple[list[float], bool]:
            optimizer = optimizer_factory("sgd", 0.05, weight_decay=0.0)
            with Pipeline(
                model, batch, optimizer=optimizer, loss_fn=loss_fn, schedule=schedule, world=world
            ) as pipe:
                try:
                    losses = [loss for _, loss in pipe.train(varied(batch, 6))]
                    losses.append(pipe.evaluate(varied(batch, 2)))
                finally:
                    places[pipe.rank] = pipe.runtime.whereabouts.page.place(pipe.rank).action
                finite = all(t.isfinite().all() for t in pipe.state_dict().values() if t.is_floating_point())
                return losses, finite

        try:
            return run_ranks(2, on_rank), places
        except RuntimeError as error:
            return str(error), places
        finally:
            monkeypatch.delenv(VARIABLE)
            faults.wanted.cache_clear()

    return train


POINTS = {  # point ▶ rank, the action that is under way
    "fwd_recv": (1, "1RECV_F3"),
    "fwd": (1, "1F3"),
    "fwd_send": (0, "0SEND_F3"),
    "bwd_recv": (0, "0RECV_B3"),
    "bwd": (1, "1B3"),
    "bwd_send": (1, "1SEND_B3"),
    "reduce": (0, "0REDUCE3"),
    "step": (0, "0STEP3"),
}


@pytest.mark.parametrize("point", POINTS)
def test_a_fault_strikes_at_its_point_and_nowhere_else(point: str, faulty: Callable[..., Any]) -> None:
    rank, action = POINTS[point]
    said, places = faulty(f"rank={rank},step=3,point={point},minibatch=3,kind=raise")
    assert said == f"VPIPE_FAULT asked for this at {point}"
    assert places[rank] == Action.parse(action)


def test_a_fault_strikes_in_its_attempt_only(faulty: Callable[..., Any]) -> None:
    (losses, _), _ = faulty("rank=0,step=1,point=fwd,kind=raise", attempt=1)[0]
    assert len(losses) == 7
    assert isinstance(faulty("rank=0,step=1,point=fwd,kind=raise,attempt=1", attempt=1)[0], str)


@pytest.mark.parametrize("point", ["data,minibatch=4", "eval,step=6", "init", "shutdown"])
def test_points_outside_the_program(point: str, faulty: Callable[..., Any]) -> None:
    name = point.partition(",")[0]
    assert faulty(f"rank=0,point={point},kind=raise")[0] == f"VPIPE_FAULT asked for this at {name}"


@pytest.mark.parametrize("point", TENSOR_POINTS)
def test_nan_poisons_what_is_there(point: str, faulty: Callable[..., Any]) -> None:
    reported, _ = faulty(f"rank={POINTS[point][0]},step=3,point={point},kind=nan")
    losses, _ = reported[0]
    assert all(map(math.isfinite, losses[:3]))
    assert not all(finite for _, finite in reported)


def test_without_a_fault_nothing_changes(faulty: Callable[..., Any]) -> None:
    reported, _ = faulty("rank=7,point=fwd,kind=raise")
    assert all(finite for _, finite in reported)
    table = {}
    assert with_faults(type("Runtime", (), {"rank": 0}), table) is table  # type: ignore[arg-type]


def test_a_sleep_may_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "rank=0,point=fwd,kind=sleep,seconds=0,times=2")
    faults.wanted.cache_clear()
    (fault,) = faults.wanted(0)
    struck = 0
    while fault.fits("fwd", 0, 0):
        fault.strike()
        struck += 1
    faults.wanted.cache_clear()
    assert struck == 2
