"""Plans for PipeDream's own profiles against its optimizer (`tests/pipedream_optimizer.py`)."""

from __future__ import annotations

from itertools import product
from math import inf
from random import Random
from typing import Any

import pytest

from tests.every_plan import compositions
from tests.pipedream_contest import FAST, SLOW, contest
from tests.pipedream_graphs import NAMES, Graph, Layer, graph_text, profile_of, read_graph
from tests.pipedream_optimizer import Stage, optimize
from vpipe.cost import LinkCost
from vpipe.plan import choice
from vpipe.plan.count_search import MOST, CountSearch

PARAMETERS = {
    "alexnet": 61_100_840,
    "densenet121": 7_978_856,
    "gnmt": 193_765_952,
    "gnmt_large": 277_717_568,
    "inception_v3": 27_161_264,
    "resnet101": 44_549_160,
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "resnext101": 44_177_704,
    "resnext50": 25_028_904,
    "squeezenet1_0": 1_248_424,
    "vgg16": 138_357_544,
}
"""Of the image models: what torchvision states (resnext101 is 32x4d: what its ResNet class has with these arguments).
Of the others: the sum of the figures, against later changes."""
SIZES = {
    "alexnet": (23, 23),
    "densenet121": (429, 487),
    "gnmt": (48, 58),
    "gnmt_large": (96, 122),
    "inception_v3": (326, 362),
    "resnet101": (347, 380),
    "resnet18": (71, 79),
    "resnet50": (177, 193),
    "resnext101": (347, 380),
    "resnext50": (177, 193),
    "squeezenet1_0": (68, 76),
    "vgg16": (41, 41),
}
"""Nodes and edges."""
QUICK = [
    ("alexnet", 4, FAST), ("alexnet", 2, SLOW), ("gnmt", 2, FAST), ("inception_v3", 8, SLOW), ("resnet18", 2, SLOW),
    ("vgg16", 6, SLOW),
]  # fmt: skip
REST = [case for case in product(NAMES, (2, 4, 8), (FAST, SLOW)) if case not in QUICK]


@pytest.mark.parametrize("name", NAMES)
def test_the_profiles_are_whole(name: str) -> None:
    graph = read_graph(name)
    assert (len(graph.layers), len(set(graph.edges))) == SIZES[name]
    assert len({layer.number for layer in graph.layers}) == len(graph.layers)
    assert sum(layer.parameters for layer in graph.layers) == 4 * PARAMETERS[name]
    blocks = profile_of(graph, LinkCost(FAST)).blocks
    counted = [layer for layer in graph.layers if not layer.kind.startswith("Input")]
    assert sum(block.forward for block in blocks) == pytest.approx(sum(one.forward for one in counted) / 1000)
    assert sum(block.backward for block in blocks) == pytest.approx(
        sum(one.backward for one in counted) / 1000
    )


@pytest.mark.parametrize(
    ("name", "ranks", "bandwidth"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.long) for case in REST)]
)
def test_no_worse_than_pipedream(name: str, ranks: int, bandwidth: float) -> None:
    found = contest(name, ranks, bandwidth)
    assert found.ours <= found.theirs * (1 + 1e-9)
    assert found.our_memory <= found.cap
    assert found.result.seconds == found.ours


@pytest.mark.parametrize(
    ("name", "ranks", "bandwidth"),
    [("gnmt", 2, SLOW), *(pytest.param(name, 4, SLOW, marks=pytest.mark.long) for name in NAMES)],
)
def test_nor_where_it_keeps_everything(name: str, ranks: int, bandwidth: float) -> None:
    found = contest(name, ranks, bandwidth, keep=True)
    assert found.ours <= found.theirs * (1 + 1e-9)
    assert set(found.result.policies) == {"keep"}


def test_a_choice_among_many_different_blocks_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages of many blocks that all differ, and memory is short: to prove a choice the best took millions of steps."""
    steps = []

    class Counted(CountSearch):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            steps.append(self.steps)

    monkeypatch.setattr(choice, "CountSearch", Counted)
    contest("resnext101", 4, SLOW)
    assert MOST <= max(steps) < 2 * MOST


@pytest.mark.parametrize(("name", "milliseconds"), [("gnmt", 25.868), ("gnmt_large", 137.129)])
def test_pipelines_without_replicas(name: str, milliseconds: float) -> None:
    """What PipeDream's own optimizer says of four ranks; vpipe finds the same, at equal memory."""
    found = contest(name, 4, FAST, straight=True)
    assert 1000 * found.theirs == pytest.approx(milliseconds, abs=0.001)
    assert found.ours == pytest.approx(found.theirs)


# The reference itself


def slowest(stages: list[Stage], bandwidth: float) -> float:
    """By the formulas, stage by stage."""
    most = 0.0
    for stage in stages:
        work = sum(layer.forward + layer.backward for layer in stage.layers) / 1000
        reduced = 2 * (stage.replicas - 1) * sum(layer.parameters for layer in stage.layers) / bandwidth
        most = max(most, max(work, reduced) / stage.replicas, 2 * stage.crossing / bandwidth)
    return most


def chain(random: Random, count: int) -> Graph:
    layers = [
        Layer(
            number, "Layer", random.uniform(1, 9), random.uniform(1, 9), (random.randint(0, 8),), random.randint(0, 9)
        )
        for number in range(1, count + 1)
    ]  # fmt: skip
    return Graph(tuple(layers), tuple((number, number + 1) for number in range(1, count)))


@pytest.mark.parametrize("seed", range(4))
def test_the_reference_finds_the_best_by_its_formulas(seed: int) -> None:
    graph, bandwidth, best = chain(Random(seed), 7), 1500.0, []
    for count in (1, 2, 3, 4):
        for sizes, replicas in product(compositions(7, count), compositions(4, count)):
            start, stages = 0, []
            for size, copies in zip(sizes, replicas, strict=True):
                own = graph.layers[start : start + size]
                start += size
                stages.append(Stage(own, copies, sum(own[-1].outputs) if start < 7 else 0))
            best.append(slowest(stages, bandwidth))
    assert slowest(optimize(graph, 4, bandwidth), bandwidth) == pytest.approx(min(best))


def test_the_reference_cuts_between_branches() -> None:
    """1 - (2 | 3) - 4: with 2 on the first rank and 3 on the second the two are even, in any order of the lines."""
    layers = [
        Layer(number, "Layer", time, 0.0, (4,), 0)
        for number, time in ((1, 1.0), (3, 4.0), (2, 4.0), (4, 1.0))
    ]
    graph = Graph(tuple(layers), ((1, 2), (1, 3), (2, 4), (3, 4)))
    stages = optimize(graph, 2, 1e6, 1)
    assert slowest(stages, 1e6) == pytest.approx(0.005)
    assert stages[0].crossing == 8


def branches(random: Random) -> Graph:
    """1 - (2 - 3 | 4 - 5 | 6) - 7, and 8 that reads 1 and is read by none."""
    layers = chain(random, 8).layers
    edges = ((1, 2), (2, 3), (1, 4), (4, 5), (1, 6), (3, 7), (5, 7), (6, 7), (1, 8))
    return Graph(layers, edges)


def fastest(graph: Graph, done: frozenset[int], ranks: int, bandwidth: float, most: int) -> float:
    """The slowest stage of the best pipeline for what is not done: every set of layers is tried as the next stage."""
    if len(done) == len(graph.layers):
        return 0.0 if ranks == 0 else inf
    best = inf
    left = [layer for layer in graph.layers if layer.number not in done]
    for taken in product((False, True), repeat=len(left)):
        own = tuple(layer for layer, is_taken in zip(left, taken, strict=True) if is_taken)
        after = done | {layer.number for layer in own}
        if not own or any(reader in after and source not in after for source, reader in graph.edges):
            continue
        sent = {source for source, reader in graph.edges if source in after and reader not in after}
        crossing = sum(sum(layer.outputs) for layer in graph.layers if layer.number in sent)
        for replicas in range(1, min(most, ranks) + 1):
            stage = slowest([Stage(own, replicas, crossing)], bandwidth)
            if stage < best:
                best = min(best, max(stage, fastest(graph, after, ranks - replicas, bandwidth, most)))
    return best


@pytest.mark.parametrize("most", [1, 3])
@pytest.mark.parametrize("bandwidth", [300.0, 3000.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_reference_finds_the_best_of_all_cuts(seed: int, bandwidth: float, most: int) -> None:
    graph = branches(Random(seed))
    found = slowest(optimize(graph, 3, bandwidth, most), bandwidth)
    assert found == pytest.approx(fastest(graph, frozenset(), 3, bandwidth, most))


def test_the_text_is_pipedreams() -> None:
    lines = graph_text(read_graph("gnmt")).splitlines()
    assert lines[5] == (
        "node7 -- LSTM#7 -- forward_compute_time=3.190, backward_compute_time=5.348, "
        "activation_size=[6291456.0; 131072.0; 131072.0], parameter_size=50364416.000"
    )
    assert lines[-1] == "\tnode47 -- node48"
