"""Losses on a GPU, played by the test: sent when the number has reached the host, at the latest when others read it."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

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

    monkeypatch.setattr(module, "_copied_to_host", copied)
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
