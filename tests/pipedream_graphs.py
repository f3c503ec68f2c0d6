"""The layer graphs of `tests/pipedream_profiles`, and vpipe's profiles of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from graphlib import TopologicalSorter
from heapq import heappop, heappush
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from vpipe.cost import LinkCost, Profile, read_pipedream_graph

FOLDER = Path(__file__).parent / "pipedream_profiles"
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.txt")))
EDGE = re.compile(r"(\d+)-(\d+)")


class Layer(NamedTuple):
    number: int
    kind: str
    forward: float
    """Milliseconds."""
    backward: float
    outputs: tuple[int, ...]
    """Bytes of each."""
    parameters: int
    """Bytes."""


class Graph(NamedTuple):
    layers: tuple[Layer, ...]
    edges: tuple[tuple[int, int], ...]
    """Numbers of a layer and of one that reads its output."""


def read_graph(name: str) -> Graph:
    layers, edges = [], []
    for line in (FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        parts = line.split()
        if EDGE.fullmatch(parts[0]):
            for part in parts:
                source, _, reader = part.partition("-")
                edges.append((int(source), int(reader)))
        else:
            number, kind, forward, backward, outputs, parameters = parts
            sizes = tuple(map(int, outputs.split(";")))
            layers.append(Layer(int(number), kind, float(forward), float(backward), sizes, int(parameters)))
    return Graph(tuple(layers), tuple(edges))


def graph_text(graph: Graph) -> str:
    """As PipeDream writes it; a layer is called by its kind and its number, an input by its kind."""
    lines = []
    for layer in graph.layers:
        sizes = "; ".join(f"{size:.1f}" for size in layer.outputs)
        lines.append(
            f"node{layer.number} -- {name_of(layer)} -- forward_compute_time={layer.forward:.3f}, "
            f"backward_compute_time={layer.backward:.3f}, "
            f"activation_size={sizes if len(layer.outputs) == 1 else f'[{sizes}]'}, "
            f"parameter_size={layer.parameters:.3f}"
        )
    lines += [f"\tnode{source} -- node{reader}" for source, reader in graph.edges]
    return "\n".join(lines) + "\n"


def name_of(layer: Layer) -> str:
    return layer.kind if layer.kind.startswith("Input") else f"{layer.kind}#{layer.number}"


def profile_of(graph: Graph, link: LinkCost) -> Profile:
    """As vpipe reads the file, with another link."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "graph.txt"
        path.write_text(graph_text(graph), encoding="utf-8")
        return replace(read_pipedream_graph(path), link=link)


def layers_of_blocks(graph: Graph, profile: Profile) -> list[tuple[Layer, ...]]:
    """The layers that vpipe has put into each block of its profile."""
    order, found = list(_in_order(graph)), []
    places = {name_of(layer): place for place, layer in enumerate(order)}
    start = 0
    for block in profile.blocks:
        stop = 1 + places[block.name.split(" ... ")[-1]]
        found.append(tuple(order[start:stop]))
        assert block.parameter_bytes == sum(layer.parameters for layer in found[-1])
        assert block.kept_bytes == sum(sum(layer.outputs) for layer in found[-1])
        start = stop
    assert start == len(order)
    return found


def _in_order(graph: Graph) -> Iterator[Layer]:
    """Behind all that it reads; of those that could be next, the first in the file."""
    places = {layer.number: place for place, layer in enumerate(graph.layers)}
    sorter = TopologicalSorter({layer.number: () for layer in graph.layers})
    for source, reader in graph.edges:
        sorter.add(reader, source)
    sorter.prepare()
    ready: list[int] = []
    while sorter.is_active():
        for number in sorter.get_ready():
            heappush(ready, places[number])
        layer = graph.layers[heappop(ready)]
        yield layer
        sorter.done(layer.number)
