"""PipeDream's profile, graph.txt: a graph of layers with their costs, read as a chain of blocks.

    node1 -- Input0 -- forward_compute_time=0.0, backward_compute_time=0.0, activation_size=0.0, parameter_size=0.0
    node2 -- Linear(8, 8) -- forward_compute_time=1.2, backward_compute_time=2.3, activation_size=[4.0; 8.0], ...
    <tab>node1 -- node2

Times are milliseconds and sizes bytes. The layers stand in topological order; where a single value crosses from
one part of them to the rest, a block ends, so that parallel branches come to lie inside one block. A block that
would hold more than a 32nd of all compute would leave little to choose (an encoder's output, read all along the
decoder, crosses everywhere): it is cut behind every layer, with all that crosses there as boundary. The time of an
`Input` is that of loading data, which every stage does beside its computation: it is no compute.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush
from pathlib import Path

from vpipe.cost.costs import BlockCost, DeviceCost, Profile
from vpipe.cost.fields import finite
from vpipe.cost.links import LinkCost
from vpipe.errors import ConfigError
from vpipe.system.files import read_text, short_repr

COSTS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
WRITE_NODE = f"write `node1 -- name -- {'=0.0, '.join(COSTS)}=0.0`"
NODE = re.compile(r"(\S+) -- (.*) -- (forward_compute_time=.*?)( -- stage_id=\d+)?")
INPUT = re.compile(r"Input\d*")
LARGEST_SHARE = 1 / 32
"""Of all compute, in a block that might be cut."""
# The format says nothing of the machine: a device of 16 GiB on PCIe 3, and 10 Gbit/s between ranks.
DEVICE = DeviceCost(memory=16 * 2**30, to_host=12e9, from_host=12e9)
LINK = LinkCost(bandwidth=1.25e9, latency=5e-5)


@dataclass
class _Layer:
    name: str
    forward: float
    backward: float
    activation: float
    parameters: float
    sources: list[int] = field(default_factory=list)
    readers: list[int] = field(default_factory=list)

    @property
    def is_input(self) -> bool:
        """A field of the raw batch, which every stage loads itself: it is never sent."""
        return not (self.sources or self.forward or self.backward or self.parameters)

    def without_loading(self) -> _Layer:
        """The layer without the time that loading data takes, if it does that."""
        loads = INPUT.fullmatch(self.name) and not (self.sources or self.parameters)
        return replace(self, forward=0.0, backward=0.0) if loads else self


def is_pipedream_graph(text: str) -> bool:
    return any(NODE.fullmatch(line.strip()) for line in text.splitlines())


def read_pipedream_graph(path: Path, *, batch_size: int = 1) -> Profile:
    """A layer keeps its activation for backward. Where it has parameters, half of its backward is the weights'."""
    layers = _in_order([layer.without_loading() for layer in _read_layers(path)], path)
    blocks = [_block(layers[start:stop], crossing) for start, stop, crossing in _cuts(layers)]
    return Profile(tuple(blocks), DEVICE, LINK, batch_size)


def _read_layers(path: Path) -> list[_Layer]:
    numbers: dict[str, int] = {}
    layers: list[_Layer] = []
    edges: list[tuple[str, str, str]] = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        place = f"{path}, line {number}"
        if not line.strip():
            continue
        if line.startswith("\t"):
            ends = line.strip().split(" -- ")
            if len(ends) != 2:
                raise ConfigError(f"{place}: {short_repr(line)} is no edge: write a tab and `node1 -- node2`")
            edges.append((ends[0], ends[1], place))
            continue
        match = NODE.fullmatch(line.strip())
        if match is None:
            raise ConfigError(f"{place}: {short_repr(line)} is no node: {WRITE_NODE}")
        if match[1] in numbers:
            raise ConfigError(f"{place}: node {short_repr(match[1])} stands twice: give it another name")
        numbers[match[1]] = len(layers)
        layers.append(_layer(match[2], match[3], place))
    if not layers:
        raise ConfigError(f"{path}: has no node: {WRITE_NODE}")
    for source, reader, place in edges:
        for end in (source, reader):
            if end not in numbers:
                raise ConfigError(f"{place}: the edge names {short_repr(end)}, which is no node of the file")
        layers[numbers[source]].readers.append(numbers[reader])
        layers[numbers[reader]].sources.append(numbers[source])
    return layers


def _layer(layer_name: str, text: str, place: str) -> _Layer:
    parts = [part.partition("=") for part in text.split(", ")]
    if [name for name, _, _ in parts] != list(COSTS):
        raise ConfigError(f"{place}: {short_repr(text)} does not hold {', '.join(COSTS)}, in this order")
    forward, backward, activation, parameters = (_number(name, value, place) for name, _, value in parts)
    return _Layer(layer_name, forward, backward, activation, parameters)


def _number(name: str, text: str, place: str) -> float:
    """A number, or the sum of a list such as [1.0; 2.0] where a layer has several outputs."""
    listed = name == "activation_size" and text.startswith("[") and text.endswith("]")
    try:
        values = [float(part) for part in (text[1:-1].split(";") if listed else [text])]
    except ValueError:
        values = [float("nan")]
    total = finite(sum(values))
    if total is None or min(values) < 0:
        raise ConfigError(f"{place}: {name} is {short_repr(text)}: expected a number, 0 or more")
    return total


def _in_order(layers: list[_Layer], path: Path) -> list[_Layer]:
    """The layers in topological order, as close to the file's own order as that allows, and renumbered."""
    sorter = TopologicalSorter({number: layer.sources for number, layer in enumerate(layers)})
    try:
        sorter.prepare()
    except CycleError as error:
        name = layers[min(error.args[1])].name
        raise ConfigError(
            f"{path}: the edges form a circle through {short_repr(name)}: remove one of them"
        ) from None
    order: list[int] = []
    ready: list[int] = []
    while sorter.is_active():
        for number in sorter.get_ready():
            heappush(ready, number)
        order.append(heappop(ready))
        sorter.done(order[-1])
    place = {number: position for position, number in enumerate(order)}
    for layer in layers:
        layer.sources = [place[number] for number in layer.sources]
        layer.readers = [place[number] for number in layer.readers]
    return [layers[number] for number in order]


def _cuts(layers: list[_Layer]) -> Iterator[tuple[int, int, float]]:
    """(start, stop, bytes that cross at its end) of each block."""
    live: dict[int, int] = {}  # a layer whose value is still read: the last that reads it
    crossing: dict[int, float] = {}  # bytes behind each place where a block may end
    single: list[int] = []
    for position, layer in enumerate(layers[:-1]):
        live = {source: last for source, last in live.items() if last > position}
        if layer.is_input:
            continue
        if layer.readers:
            live[position] = max(layer.readers)
        crossing[position + 1] = sum(layers[source].activation for source in live)
        if len(live) == 1:
            single.append(position + 1)
    most = sum(layer.forward + layer.backward for layer in layers) * LARGEST_SHARE
    start = 0
    for stop in (*single, len(layers)):
        inner: list[int] = []
        if sum(layer.forward + layer.backward for layer in layers[start:stop]) > most:
            inner = [place for place in crossing if start < place < stop]
        for place in (*inner, stop):
            yield start, place, crossing.get(place, 0.0)
            start = place


def _block(layers: list[_Layer], crossing: float) -> BlockCost:
    named = [layer for layer in layers if not layer.is_input] or layers
    name = named[0].name if len(named) == 1 else f"{named[0].name} ... {named[-1].name}"
    weights = sum(layer.backward / 2 for layer in layers if layer.parameters)
    return BlockCost(
        name=name,
        forward=sum(layer.forward for layer in layers) / 1000,
        input_gradient=(sum(layer.backward for layer in layers) - weights) / 1000,
        weight_gradient=weights / 1000,
        update=0.0,
        kept_bytes=round(sum(layer.activation for layer in layers)),
        boundary_bytes=round(crossing),
        parameter_bytes=round(sum(layer.parameters for layer in layers)),
    )
