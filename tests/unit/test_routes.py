"""Sources and targets of a minibatch's values, as each rank sees them."""

from collections.abc import Callable

import pytest
import torch

from tests.examples import example
from vpipe.graph import ModelGraph
from vpipe.runtime.routes import Link, Routes
from vpipe.schedule import build

Captured = Callable[..., ModelGraph]


@pytest.fixture
def graph(captured: Captured) -> ModelGraph:
    return captured(*example("sequential", layers=4))


def ways(links: list[Link]) -> list[tuple[int, int]]:
    return [(link.stage, link.rank) for link in links]


def test_replicas_take_turns(graph: ModelGraph) -> None:
    """Ranks 0, 1 and 2, 3 hold stages 0, 1 and 1, 2: minibatch 0 goes 0 ▶ 1 ▶ 3, minibatch 1 goes 0 ▶ 2 ▶ 3."""
    schedule = build("pipedream", 3, 4, replicas=(1, 2, 1))
    stages = graph.stages(graph.balanced_partition(3))
    first, upper, lower, last = (Routes(graph, stages, schedule, rank) for rank in range(4))
    assert [ways(first.route(0, place).sent) for place in range(4)] == [[(1, 1)], [(1, 2)]] * 2
    assert [ways(last.route(2, place).received) for place in range(4)] == [[(1, 1)], [(1, 2)]] * 2
    assert [upper.stages_passed(place) for place in range(4)] == [[1], []] * 2
    assert [lower.stages_passed(place) for place in range(4)] == [[], [1]] * 2
    (sent,), (received,) = first.route(0, 2).sent, upper.route(1, 2).received
    assert (sent.name, sent.value, sent.dtype) == (received.name, received.value, torch.float64)
    assert first.route(0, 2).returned == [sent]
    assert not first.route(0, 0).received
    assert not last.route(2, 0).sent


def test_values_between_stages_of_one_rank_are_passed_on(graph: ModelGraph) -> None:
    """zb-v on two ranks: stages 0 and 3 on rank 0, 1 and 2 on rank 1, where the V turns."""
    schedule = build("zb-v", 2, 4)
    stages = graph.stages(graph.balanced_partition(4))
    turn = Routes(graph, stages, schedule, 1)
    ((value, reader),) = turn.route(1, 0).passed_on
    assert (reader, turn.route(2, 0).passed_in) == (2, [(value, 1)])
    assert ways(turn.route(1, 0).received) == [(0, 0)]
    assert ways(turn.route(2, 0).sent) == [(3, 0)]
    assert turn.stages_passed(0) == [1, 2]


def test_every_rank_names_the_same_tensors_in_the_same_order(graph: ModelGraph) -> None:
    schedule = build("1f1b", 3, 4)
    stages = graph.stages(graph.balanced_partition(3))
    names = [list(Routes(graph, stages, schedule, rank).wire_names()) for rank in range(3)]
    assert names[0] == names[1] == names[2]
    assert len(set(names[0])) == 2
