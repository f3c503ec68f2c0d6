"""The model's outputs: fetched from the ranks that compute their parts, and metrics of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from vpipe.communication import World, agree
from vpipe.errors import VPipeError
from vpipe.graph.outputs import ModelOutput
from vpipe.pipeline.layout import Layout
from vpipe.runtime import StageRuntime

Metrics = Callable[[Any, Any], Mapping[str, Any]]
"""From a minibatch's output and the batch to numbers by name, or to pairs (sum, count)."""


def remembering(batches: Iterable[Any], read: dict[int, Any]) -> Iterator[Any]:
    """The batches; each is kept in `read` by its number until somebody takes it out."""
    for number, batch in enumerate(batches):
        read[number] = batch
        yield batch


class OutputExchange:
    """Every rank has one and calls `output` for the same minibatches in the same order."""

    def __init__(self, layout: Layout, runtime: StageRuntime) -> None:
        self._layout, self._runtime = layout, runtime
        self._stage_of = {
            node.name: stage.index
            for stage in layout.stage_graphs
            for block in stage.owned
            for node in block.nodes
        }
        self._sent = 0
        runtime.handler.register_tensor("output")

    def output(
        self, kept: dict[tuple[int, str], Tensor], number: int, place: int, batch: Any, receiver: int
    ) -> tuple[bool, Any]:
        """Whether this rank is the receiver, and the output there, on the host."""
        made = self._made()
        trace, handler, rank = self._layout.graph.trace, self._runtime.handler, self._runtime.rank
        values: dict[str, Tensor] = {}
        fields: dict[str, Tensor] = self._layout.normalise(batch) if rank == receiver else {}
        for node in made.values:
            self._sent += 1
            owner = self._layout.schedule.rank_of(self._stage_of[node.name], place)
            name = "loss" if node is trace.loss else node.name
            if owner == rank == receiver:
                values[node.name] = kept[number, name].cpu()
            elif owner == rank:
                value = kept[number, name].cpu().contiguous()
                handler.send("output", value, self._sent, receiver, host=True)
            elif rank == receiver:
                shape = self._layout.graph.shape(
                    node.name, {key: tensor.shape for key, tensor in fields.items()}
                )
                dtype, key = trace.specs[node].dtype, ("output", self._sent)
                values[node.name] = handler.recv(
                    "output", self._sent, owner, shape, dtype, owner=key, host=True
                ).clone()
                handler.release(key)
        for done in [entry for entry in kept if entry[0] == number]:
            del kept[done]
        return rank == receiver, made.make(values, fields) if rank == receiver else None

    def _made(self) -> ModelOutput:
        output = self._layout.graph.trace.output
        if output is None:
            raise VPipeError(
                "the model could not be captured and its children run eagerly: its outputs are not known; use evaluate "
                "without metrics"
            )
        for node in output.values:
            if node.name not in self._stage_of:
                raise VPipeError(
                    f"the model's output needs {node.name!r}, which no stage computes: let the model return what its "
                    "loss is computed from"
                )
        return output


class MetricSums:
    """Sums of a user's metrics over minibatches, of which each rank has some."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._sums: dict[str, list[float]] = {}
        self._mistake: Exception | None = None

    def add(self, output: Any, batch: Any, weight: float) -> None:
        """Call the metrics; an error waits for `gather`: the other ranks go on with this evaluation until then."""
        try:
            if self._mistake is None:
                self._add(output, batch, weight)
        except Exception as error:
            self._mistake = error

    def _add(self, output: Any, batch: Any, weight: float) -> None:
        found = self._metrics(output, batch)
        if not isinstance(found, Mapping):
            raise VPipeError(
                f"metrics returned {type(found).__name__}: return a dict of numbers by name, such as "
                "{'accuracy': 0.5}, or of pairs (sum, count)"
            )
        for name, value in found.items():
            if name == "loss":
                raise VPipeError(
                    "metrics returned 'loss', which is what evaluate calls its own: give it another name"
                )
            pair = isinstance(value, tuple | list)
            try:
                top, bottom = map(float, value) if pair else (float(value) * weight, weight)
            except (TypeError, ValueError, RuntimeError):
                raise VPipeError(
                    f"metric {name!r} is of type {type(value).__name__}: give a number, or a pair (sum, count)"
                ) from None
            sums = self._sums.setdefault(str(name), [0.0, 0.0])
            sums[0] += top
            sums[1] += bottom

    def gather(self, world: World) -> dict[str, float]:
        """The metrics over all minibatches, the same on every rank; or the error of one of them, on every rank."""
        agree(world, "metrics called", self._check)
        total: dict[str, list[float]] = {}
        for sums in world.all_gather("metrics", self._sums):
            for name, (top, bottom) in sums.items():
                known = total.setdefault(name, [0.0, 0.0])
                known[0] += top
                known[1] += bottom
        return {name: top / bottom if bottom else 0.0 for name, (top, bottom) in total.items()}

    def _check(self) -> None:
        if self._mistake is not None:
            raise self._mistake
