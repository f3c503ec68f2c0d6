"""Losses on a GPU, played by the test: sent when the number has reached the host, at the latest when others read it."""

from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.both_ways import adamw
from tests.examples import example, varied
from vpipe import Pipeline
from vpipe.pipeline.threads import run_ranks
from vpipe.runtime import losses as module
from vpipe.runtime.losses import Losses

LATE = 2


class Copy:
    """An event behind the copy of a number to the host."""

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.passed = True


class Ranks:
    """What two ranks have sent each other."""

    def __init__(self) -> None:
        self.sent: dict[tuple[int, int], list[float]] = {}

    def handler(self, rank: int) -> Any:
        def post(name: str, number: int, values: list[float], peers: list[int]) -> None:
            self.sent[rank, number] = values

        def collect(name: str, number: int, count: int, peers: list[int]) -> dict[int, list[float]]:
            return {peer: self.sent[peer, number] for peer in peers}

        return SimpleNamespace(
            rank=rank,
            device=torch.device("cpu"),
            register_tensor=lambda name: None,
            everyone=lambda: [1 - rank],
            post=post,
            collect=collect,
        )

    @property
    def updates(self) -> list[int]:
        return [number for _, number in self.sent]


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> dict[float, Copy]:
    made: dict[float, Copy] = defaultdict(Copy)

    def copied(number: Tensor) -> tuple[Tensor, Any]:
        return number, made[float(number)]

    monkeypatch.setattr(module, "copied_to_host", copied)
    return made


def last_stage(ranks: Ranks) -> Losses:
    return Losses(ranks.handler(1), (1,), LATE, lambda: 0, stop_unless_finite=False)


def make_update(losses: Losses, update: int) -> None:
    """The only forward of an update, and its STEP."""
    losses.record(update, update, torch.tensor(float(update)), 1.0, 1)
    losses.post(update)
    losses.expect(update)


def test_a_loss_is_sent_as_soon_as_it_is_there(copies: dict[float, Copy]) -> None:
    ranks = Ranks()
    losses = last_stage(ranks)
    make_update(losses, 0)
    assert ranks.updates == []
    copies[0.0].passed = True
    losses.record(1, 1, torch.tensor(1.0), 1.0, 2)
    assert ranks.updates == [0]


def test_a_loss_that_others_read_with_this_update_is_waited_for(copies: dict[float, Copy]) -> None:
    ranks = Ranks()
    losses = last_stage(ranks)
    for update in range(LATE):
        make_update(losses, update)
    assert ranks.updates == []
    make_update(losses, LATE)
    assert ranks.updates == [0]
    assert not copies[1.0].passed


def test_every_rank_reads_the_same_losses_at_the_same_update(copies: dict[float, Copy]) -> None:
    ranks = Ranks()
    last = last_stage(ranks)
    first = Losses(ranks.handler(0), (1,), LATE, lambda: 0, stop_unless_finite=False)
    read: list[list[float]] = [[], []]
    for update in range(5):
        make_update(last, update)  # the last stage is the first to make an update
        first.expect(update)
        for seen, losses in zip(read, (first, last), strict=True):
            seen += [loss for _, loss, _ in losses.arrived()]
        assert read == [[float(number) for number in range(update + 1 - LATE)]] * 2
    for seen, losses in zip(read, (last, first), strict=True):  # drained
        seen += [loss for _, loss, _ in losses.arrived(all_of_them=True)]
    assert read == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 2


@pytest.mark.parametrize("schedule", ["1f1b", "vpipe"])
def test_receives_of_losses_are_posted_before_large_messages_come(capture_once: None, schedule: str) -> None:
    """Over gloo a message moves when its receive is posted: later, it would wait behind activations."""
    model, batch, loss_fn = example("sequential", torch.float32)
    options = {"minibatches": 2} if schedule == "1f1b" else {}

    def work(world: Any) -> list[tuple[str, int]]:
        seen: list[tuple[str, int]] = []
        with Pipeline(
            model, batch, optimizer=adamw, loss_fn=loss_fn, schedule=schedule, world=world, **options
        ) as pipe:
            expect, collect = pipe.handler.expect_numbers, pipe.handler.collect

            def note(kind: str, call: Any, name: str, number: int, *rest: Any) -> Any:
                if name == "loss":
                    seen.append((kind, number))
                return call(name, number, *rest)

            pipe.handler.expect_numbers = partial(note, "posted", expect)  # type: ignore[method-assign]
            pipe.handler.collect = partial(note, "read", collect)  # type: ignore[method-assign]
            pipe.on_action(lambda work: seen.append(("backward", work.minibatch.update)), ("B",))
            list(pipe.train(varied(batch, 8)))
        return seen

    for seen in run_ranks(2, work):
        for update in {number for _, number in seen}:
            places = [seen.index((kind, update)) for kind in ("posted", "backward", "read")]
            assert places == sorted(places)
