"""A model that ranks share as threads, captured once for all of them; several pipelines of the same threads."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vpipe
from vpipe.communication import InProcessWorld
from vpipe.graph import ModelGraph, capture


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 1)
        self.scale = 1.0

    def forward(self, inputs: Tensor) -> Tensor:
        return self.scale * self.two(self.one(inputs)).square().mean()


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The models that are captured from now on."""
    found: list[nn.Module] = []

    def counted(model: nn.Module, *arguments: Any, **options: Any) -> ModelGraph:
        found.append(model)
        return capture(model, *arguments, **options)

    monkeypatch.setattr("vpipe.pipeline.captured.capture", counted)
    return found


def losses(world: InProcessWorld, model: nn.Module) -> list[float]:
    batch = torch.ones(2, 4)
    optimizer = partial(torch.optim.SGD, lr=0.0)
    with vpipe.Pipeline(model, batch, optimizer=optimizer, minibatches=1, world=world) as pipe:
        return [loss for _, loss in pipe.train([batch])]


def test_of_ranks_that_share_a_model_one_captures_it(captures: list[nn.Module]) -> None:
    model = Scaled()
    vpipe.run_ranks(2, lambda world: losses(world, model))
    assert captures == [model]


def test_a_model_that_has_changed_is_captured_again(captures: list[nn.Module]) -> None:
    model = Scaled()

    def work(world: InProcessWorld) -> tuple[list[float], list[float]]:
        before = losses(world, model)
        world.all_gather("trained", None)
        model.scale = 2.0
        return before, losses(world, model)

    (before, after), _ = vpipe.run_ranks(2, work)
    assert after == pytest.approx([2 * loss for loss in before])
    assert captures == [model, model]


def test_ranks_with_models_of_their_own_capture_each(captures: list[nn.Module]) -> None:
    model = Scaled()
    twins = [Scaled(), Scaled()]
    for twin in twins:
        twin.load_state_dict(model.state_dict())
    first, second = vpipe.run_ranks(2, lambda world: losses(world, twins[world.rank]))
    assert first == second
    assert {id(model) for model in captures} == {id(twin) for twin in twins}


def test_a_pipeline_knows_nothing_of_those_before_it() -> None:
    """What a rank published of the first one, a stop, is not taken by the second."""

    def work(world: InProcessWorld) -> Any:
        world.channels(1)
        world.publish("requests", [0, 1])
        world.all_gather("published", None)
        assert world.published("requests", 1 - world.rank) == [0, 1]
        world.channels(1)
        return world.published("requests", 1 - world.rank)

    assert vpipe.run_ranks(2, work) == [None, None]
