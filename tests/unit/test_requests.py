"""Requests to save or to stop: from any rank, with the losses, at the same update everywhere."""

from typing import Any

import pytest
import torch

from tests.examples import example
from vpipe import Pipeline
from vpipe.communication import InProcessHub
from vpipe.pipeline import requests
from vpipe.pipeline.requests import SAVE, STOP, Requests
from vpipe.pipeline.threads import run_ranks


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(requests, "time", made)
    return made


def two(loss_ranks: tuple[int, ...]) -> list[Requests]:
    hub = InProcessHub(2)
    return [Requests(hub.join(rank), loss_ranks) for rank in range(2)]


def test_requests_add_up_and_are_taken_once() -> None:
    alone = Requests(InProcessHub(1).join(0), (0,))
    alone.make(SAVE)
    alone.make(STOP)
    assert alone.take() == SAVE | STOP
    assert alone.take() == 0


def test_a_stop_on_another_rank_is_passed_on_at_once(clock: Clock) -> None:
    other, leader = two((1,))
    assert leader.take() == 0
    other.make(STOP)
    assert leader.take() == 0  # it has just looked
    clock.now += requests.LOOK
    assert leader.take() == STOP
    clock.now += requests.LOOK
    assert leader.take() == 0


def test_a_save_that_all_ranks_were_asked_for_is_made_once(clock: Clock) -> None:
    other, leader = two((1,))
    for each in (other, leader):
        each.make(SAVE)
    assert leader.take() == SAVE
    other.arrived(SAVE)
    clock.now += requests.GRACE + requests.LOOK
    other.arrived(0)
    assert leader.take() == 0


def test_a_save_on_another_rank_alone_is_passed_on(clock: Clock) -> None:
    other, leader = two((1,))
    for _ in range(2):
        other.make(SAVE)
        other.arrived(0)
        clock.now += requests.GRACE + requests.LOOK
        assert leader.take() == 0
        other.arrived(0)
        clock.now += requests.LOOK
        assert leader.take() == SAVE


def test_of_several_ranks_that_compute_the_loss_each_sends_its_own(clock: Clock) -> None:
    first, second = two((0, 1))
    second.make(STOP)
    clock.now += requests.LOOK
    assert (first.take(), second.take()) == (0, STOP)


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
@pytest.mark.parametrize("asking", [0, 1])
def test_a_library_user_stops_and_saves_all_ranks_at_the_same_update(
    schedule: str, asking: int, monkeypatch: pytest.MonkeyPatch, capture_once: None
) -> None:
    monkeypatch.setattr(requests, "LOOK", 0.0)
    monkeypatch.setattr(requests, "GRACE", 0.0)
    model, batch, loss_fn = example("sequential", layers=4)
    seen: list[list[tuple[int, bool, bool]]] = [[], []]
    hooked: list[list[int]] = [[], []]
    updates = [0, 0]

    def train(world: Any) -> None:
        with Pipeline(
            model,
            batch,
            optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
            loss_fn=loss_fn,
            schedule=schedule,
            world=world,
        ) as pipe:
            remove = pipe.on_update(lambda update, loss: hooked[world.rank].append(update))
            for update, _ in pipe.train(batch for _ in range(400)):
                seen[world.rank].append((update, pipe.save_requested, pipe.stop_requested))
                if world.rank == asking and update == 2:
                    pipe.request_save()
                if world.rank == asking and update == 6:
                    pipe.request_stop()
                if update == 6:
                    remove()
            assert pipe.stop_requested
            updates[world.rank] = pipe.updates
            left = [update for update, _ in pipe.train([batch] * 8)]
            assert left  # a stop ends one loop, not the pipeline
            assert not pipe.stop_requested

    run_ranks(2, train, timeout=200.0)
    assert seen[0] == seen[1]
    assert updates[0] == updates[1] == len(seen[0]) < 100
    saves = [update for update, save, _ in seen[0] if save]
    stops = [update for update, _, stop in seen[0] if stop]
    assert len(saves) == 1
    assert saves[0] > 2
    assert stops[0] > 6
    assert hooked == [list(range(7))] * 2
